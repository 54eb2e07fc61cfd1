"""The compiled parts: the library _C.so, called by ctypes, and the extension module _launch."""
