#include "ops/common/thread_objects.h"

#include <memory>

#include "pytorch/internals.h"

namespace torch_cubin {

#define TC_THREAD_OBJECTS "_ZN2at4impl24ThreadLocalPythonObjects"
#define TC_OF_STRING "ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

// at::impl::ThreadLocalPythonObjects: PyTorch passes these objects to the threads that compute
// gradients. drop_in() stores one there (torch_cubin/_pytorch/thread_objects.py). It is removed by
// storing null, because torch 2.11 has no erase().
bool thread_object_exists(const std::string& key, bool removes) {
#if defined(__GLIBCXX__) && !_GLIBCXX_USE_CXX11_ABI
  return false;  // std::string here has another ABI than PyTorch's
#else
  struct SafePyObject;  // c10's: only its presence matters
  using Object = std::shared_ptr<SafePyObject>;
  using Contains = bool (*)(const std::string&);
  using Get = const Object& (*)(const std::string&);
  using Set = void (*)(const std::string&, Object);
  static const auto contains =
      reinterpret_cast<Contains>(pytorch_symbol(TC_THREAD_OBJECTS "8contains" TC_OF_STRING));
  static const auto get =
      reinterpret_cast<Get>(pytorch_symbol(TC_THREAD_OBJECTS "3get" TC_OF_STRING));
  static const auto set = reinterpret_cast<Set>(
      pytorch_symbol(TC_THREAD_OBJECTS "3set" TC_OF_STRING "St10shared_ptrIN3c1012SafePyObjectEE"));
  // An object that could not be removed would outlive its drop_in().
  const bool exists = contains != nullptr && get != nullptr && set != nullptr && contains(key) &&
                      get(key) != nullptr;
  if (exists && removes) set(key, nullptr);
  return exists;
#endif
}

void forget_thread_object(const char* key) noexcept {
  try {
    thread_object_exists(key, /*removes=*/true);
  } catch (...) {  // out of memory for the key
  }
}

}  // namespace torch_cubin
