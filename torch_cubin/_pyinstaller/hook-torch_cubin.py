"""All files of the package. The sources, too: they are in the keys of caches on disk
(_inductor/keys.py)."""

from PyInstaller.utils.hooks import collect_all

datas, binaries, hiddenimports = collect_all("torch_cubin")
module_collection_mode = "pyz+py"
