// Signatures of packages: Ed25519 over manifest.json, which contains the sha256 of all other files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "package/package_files.h"

namespace torch_cubin {

// The trusted public keys (64 hex digits each). A package's signing key must be among `keys`, if
// given, and also among those of TORCH_CUBIN_TRUSTED, if set.
struct Trust {
  std::optional<std::vector<std::string>> keys;
};

// Throws [hash] for a package without a trusted signature, [input] for malformed keys, and [file]
// if OpenSSL's libcrypto cannot be loaded. Without keys nothing is checked. `manifest` is the
// content that was read. The signature is the file manifest.<its sha256>.sig, so that manifest and
// signature cannot be mismatched during an update.
void check_signature(const Trust& trust, const PackageFiles& files,
                     const std::vector<uint8_t>& manifest, const std::string& label);

}  // namespace torch_cubin
