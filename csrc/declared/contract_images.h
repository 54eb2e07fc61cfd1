// ContractImages: the images that contracts refer to by index, each a file's bytes, and the modules
// made of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

class ContractImages {
 public:
  // `path`: the package's own file, or "".
  void add(std::vector<uint8_t> bytes, const std::string& origin, const std::string& path = "");
  // Adds the same image again, as a manifest may list it twice; it is opened once.
  void add_again(size_t i) { files_.push_back(files_[i]); }

  size_t count() const { return files_.size(); }
  const std::string& sha256(size_t i) const { return files_[i].content->sha256; }
  const std::string& origin(size_t i) const { return files_[i].origin; }
  // [{"file": its path, "sha256"}] of all images; null if one is not a file. Made once for all
  // contracts.
  std::shared_ptr<const nlohmann::json> files();

  // The module of those images; equal sets share one. PTX is accepted only with `jit`. Throws what
  // opening them throws, and [no_kernel] if one of them lacks the kernel.
  std::shared_ptr<Module> module(const std::vector<size_t>& indices, bool jit,
                                 const std::string& kernel);

 private:
  struct Content {
    std::vector<uint8_t> bytes;
    std::vector<SourceImage> images[2];  // without and with PTX; empty until requested
    std::string sha256;
  };
  struct File {
    std::shared_ptr<Content> content;
    std::string origin, path;
  };
  std::vector<File> files_;
  std::shared_ptr<const nlohmann::json> listed_;  // files(); null until requested
  std::map<std::pair<std::vector<const Content*>, bool>, std::shared_ptr<Module>> modules_;
};

}  // namespace torch_cubin
