// Signatures of packages: Ed25519 over the bytes of manifest.json, which holds the sha256 of all else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "package/package_files.h"

namespace torch_cubin {

// By whose signature a package is taken: one of these public keys (64 hex digits each), where they are
// given, and beside that one of TORCH_CUBIN_TRUSTED, where that is set.
struct Trust {
  std::optional<std::vector<std::string>> keys;
};

// Throws [hash] for a package without such a signature; [input] for keys that are none; [file] where
// OpenSSL's libcrypto, which compares them, cannot be loaded. Without keys nothing is looked at.
// `manifest` is what was read: a package's signature is the file manifest.<its sha256>.sig, so that the
// two change at once.
void check_signature(const Trust& trust, const PackageFiles& files,
                     const std::vector<uint8_t>& manifest, const std::string& label);

}  // namespace torch_cubin
