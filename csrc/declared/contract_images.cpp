#include "declared/contract_images.h"

#include <algorithm>

#include "cubin/error.h"
#include "cubin/sha256.h"
#include "package/user_images.h"

namespace torch_cubin {

using nlohmann::json;

void ContractImages::add(std::vector<uint8_t> bytes, const std::string& origin,
                         const std::string& path) {
  auto content = std::make_shared<Content>();
  content->sha256 = sha256_hex(bytes.data(), bytes.size());
  content->bytes = std::move(bytes);
  files_.push_back({std::move(content), origin, path});
  listed_ = nullptr;
}

std::shared_ptr<const json> ContractImages::files() {
  if (listed_ != nullptr && (listed_->is_null() || listed_->size() == files_.size())) {
    return listed_;
  }
  json files = json::array();
  for (const File& file : files_) {
    if (file.path.empty()) {
      files = nullptr;
      break;
    }
    files.push_back({{"file", file.path}, {"sha256", file.content->sha256}});
  }
  listed_ = std::make_shared<const json>(std::move(files));
  return listed_;
}

std::shared_ptr<Module> ContractImages::module(const std::vector<size_t>& indices, bool jit,
                                               const std::string& kernel) {
  std::vector<SourceImage> images;
  std::vector<const Content*> contents;
  std::string origin, lacking;
  for (const size_t i : indices) {
    const File& file = files_[i];
    Content& content = *file.content;
    contents.push_back(&content);
    std::vector<SourceImage>& opened = content.images[jit];
    if (opened.empty()) {
      opened = images_of(content.bytes.data(), content.bytes.size(), file.origin, jit);
    }
    origin += (origin.empty() ? "" : ", ") + file.origin;
  }
  std::shared_ptr<Module>& module = modules_[{contents, jit}];
  if (module == nullptr) {
    for (const Content* content : contents) append_source(content->images[jit], images);
    module = std::make_shared<Module>(std::move(images), origin);
  }
  const std::string& symbol = module->kernel_called(kernel).name();  // throws if none has it
  for (const size_t i : indices) {
    const std::vector<SourceImage>& opened = files_[i].content->images[jit];
    if (std::none_of(opened.begin(), opened.end(), [&](const SourceImage& source) {
          return source.image.find(symbol) != nullptr;
        })) {
      lacking = files_[i].origin;
    }
  }
  if (!lacking.empty()) {
    fail({"no_kernel", "kernel '" + printable(kernel) + "'", "is not in every image",
          "an image that has it", lacking, "Leave that image out."});
  }
  return module;
}

}  // namespace torch_cubin
