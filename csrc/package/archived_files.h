// Archives of a package: each is one LZMA stream of several files, joined, which resemble each
// other (csrc/kernels/build/archives.py writes them). A manifest lists them:
//
//   "archives": [{"file": "sm_90a/kernels_000.lzma",
//                 "files": [{"file": "sm_90a/a.cubin", "size": 54600}, ...]}, ...]
//
// The files keep their names and their sha256 in the manifest, so that nothing else knows of
// archives.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "package/package_files.h"

namespace torch_cubin {

// The package's files, of which those in the manifest's archives are read from there; `files`
// itself if it lists none. An archive is read and decompressed at the first use of a file in it.
// The most recent archives stay decompressed, for files that are used next; their memory is the
// result's. Throws std::exception for a malformed list. Reading is thread-safe; it throws [file],
// and [image] for an archive that is damaged or does not have the size that the manifest says.
std::shared_ptr<const PackageFiles> with_archives(std::shared_ptr<const PackageFiles> files,
                                                  const nlohmann::json& manifest);

}  // namespace torch_cubin
