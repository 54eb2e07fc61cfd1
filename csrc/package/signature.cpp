#include "package/signature.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "cubin/hex.h"
#include "cubin/sha256.h"
#include "driver/dl.h"
#include "package/fields.h"
#include "package/package.h"

namespace torch_cubin {
namespace {

constexpr size_t kMaxSignatureBytes = 4096;
constexpr size_t kKeyBytes = 32;
constexpr size_t kSignatureBytes = 64;

// Decodes exactly `count` bytes from hex digits of either case; empty for any other text.
std::vector<uint8_t> bytes_of_digits(std::string text, size_t count) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  }
  return text.size() == 2 * count ? bytes_of_hex(text) : std::vector<uint8_t>();
}

using Key = std::vector<uint8_t>;

std::vector<Key> keys_of(const std::vector<std::string>& texts, const std::string& whose) {
  std::vector<Key> keys;
  for (const std::string& text : texts) {
    keys.push_back(bytes_of_digits(text, kKeyBytes));
    if (keys.back().empty()) {
      fail({"input", whose, "has an entry that is no public key", "64 hex digits",
            "'" + printable(text) + "'", ""});
    }
  }
  return keys;
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// Verifies Ed25519 signatures with OpenSSL's libcrypto (1.1.1 or 3).
class Verifier {
 public:
  explicit Verifier(const std::string& label) {
    std::string error;
    void* library = dl_open("libcrypto.so.3", &error);
    if (library == nullptr) library = dl_open("libcrypto.so.1.1", &error);
    bool complete = library != nullptr;
    const auto take = [&](auto& function, const char* name) {
      if (complete) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dl_symbol(library, name));
      }
      complete = complete && function != nullptr;
    };
    take(new_key_, "EVP_PKEY_new_raw_public_key");
    take(free_key_, "EVP_PKEY_free");
    take(new_context_, "EVP_MD_CTX_new");
    take(free_context_, "EVP_MD_CTX_free");
    take(begin_, "EVP_DigestVerifyInit");
    take(verify_, "EVP_DigestVerify");
    if (complete) return;
    fail({"file", label, "has a signature that cannot be checked", "OpenSSL's libcrypto.so.3",
          error.empty() ? "one without Ed25519" : error, "Install OpenSSL 3."});
  }

  bool verify(const Key& key, const std::vector<uint8_t>& signature,
              const std::vector<uint8_t>& bytes) const {
    constexpr int kEd25519 = 1087;  // NID_ED25519
    void* public_key = new_key_(kEd25519, nullptr, key.data(), key.size());
    void* context = new_context_();
    const bool right =
        public_key != nullptr && context != nullptr &&
        begin_(context, nullptr, nullptr, nullptr, public_key) == 1 &&
        verify_(context, signature.data(), signature.size(), bytes.data(), bytes.size()) == 1;
    free_context_(context);
    free_key_(public_key);
    return right;
  }

 private:
  void* (*new_key_)(int, void*, const unsigned char*, size_t) = nullptr;
  void (*free_key_)(void*) = nullptr;
  void* (*new_context_)() = nullptr;
  void (*free_context_)(void*) = nullptr;
  int (*begin_)(void*, void**, const void*, void*, void*) = nullptr;
  int (*verify_)(void*, const unsigned char*, size_t, const unsigned char*, size_t) = nullptr;
};

[[noreturn]] void refuse(const std::string& label, const std::string& got,
                         const std::string& advice) {
  fail({"hash", label, "is not signed by a trusted key",
        "a signature by a key of trusted= and of TORCH_CUBIN_TRUSTED, where they are given", got,
        advice});
}

constexpr char kForged[] = "Get the package from its author again.";

}  // namespace

void check_signature(const Trust& trust, const PackageFiles& files,
                     const std::vector<uint8_t>& manifest, const std::string& label) {
  std::vector<std::vector<Key>> lists;  // the signer's key must be in each
  if (trust.keys) lists.push_back(keys_of(*trust.keys, "trusted="));
  // Set but empty means no trusted keys, so that every package is refused. Unset means no
  // restriction.
  const char* environment = std::getenv("TORCH_CUBIN_TRUSTED");
  if (environment != nullptr) {
    const std::string text = environment;
    lists.push_back(keys_of(text.empty() ? std::vector<std::string>() : split_at_commas(text),
                            "TORCH_CUBIN_TRUSTED"));
  }
  if (lists.empty()) return;
  const std::string name = "manifest." + sha256_hex(manifest.data(), manifest.size()) + ".sig";
  std::vector<uint8_t> content;
  try {
    content = files.read(name, kMaxSignatureBytes);
  } catch (const Error& error) {
    refuse(label, "no signature (" + name + ")",
           "save_package(folder, ops, key=...) signs; what was changed after that is not signed.");
  }
  const std::string at = label + ": " + name;
  const nlohmann::json json = parse_json(std::string(content.begin(), content.end()), at);
  Fields fields(json, at);
  const std::string algorithm = fields.text("algorithm");
  const Key key = bytes_of_digits(fields.text("public_key"), kKeyBytes);
  const std::vector<uint8_t> signature = bytes_of_digits(fields.text("signature"), kSignatureBytes);
  fields.finish();
  if (algorithm != "ed25519" || key.empty() || signature.empty()) {
    refuse(label, "a signature of another kind, " + printable(algorithm), kForged);
  }
  for (const std::vector<Key>& keys : lists) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      refuse(label, "one by key " + printable(fields.text("public_key")),
             "Where you trust that key, name it there.");
    }
  }
  if (!Verifier(label).verify(key, signature, manifest)) {
    refuse(label, "a signature of other bytes", kForged);
  }
}

}  // namespace torch_cubin
