// NOTE: this file contains no enumerator values. torch 2.13 added an enumerator that 2.11 lacks;
// one inserted before TF32 would silently turn "IEEE" into "TF32". PyTorch's own functions
// translate the names that torch.backends takes. (Toggling torch.backends and comparing would
// change the setting for every other thread meanwhile.)
#include "pytorch/settings.h"

#include <exception>
#include <optional>
#include <string>

#include "pytorch/internals.h"

namespace torch_cubin {
namespace {

// at::Float32Backend, Float32Op and Float32Precision. No enumerator exceeds 255, so comparing low
// bytes is enough, whatever the underlying type of a later torch.
using Enumerator = int;

bool same(Enumerator a, Enumerator b) { return ((a ^ b) & 0xFF) == 0; }

struct PrecisionReader {
  Enumerator (*precision)(const void* context, Enumerator backend, Enumerator op);
  const void* context;
  Enumerator cuda, matmul, tf32;

  bool allows_tf32() const { return same(precision(context, cuda, matmul), tf32); }
};

#define TC_OF_NAME "ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

// nullopt if a symbol or a name is missing.
std::optional<PrecisionReader> find_precision_reader() {
#if defined(__GLIBCXX__) && !_GLIBCXX_USE_CXX11_ABI
  return std::nullopt;  // std::string here has another ABI than PyTorch's
#else
  using GlobalContext = const void* (*)();
  using OfName = Enumerator (*)(const std::string&);
  const auto context = reinterpret_cast<GlobalContext>(  //
      pytorch_symbol("_ZN2at13globalContextEv"));
  const auto backend = reinterpret_cast<OfName>(pytorch_symbol("_ZN2at11str2backend" TC_OF_NAME));
  const auto op = reinterpret_cast<OfName>(pytorch_symbol("_ZN2at6str2op" TC_OF_NAME));
  const auto precision =
      reinterpret_cast<OfName>(pytorch_symbol("_ZN2at13str2precision" TC_OF_NAME));
  PrecisionReader reader{};
  reader.precision = reinterpret_cast<decltype(reader.precision)>(
      pytorch_symbol("_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE"));
  if (context == nullptr || backend == nullptr || op == nullptr || precision == nullptr ||
      reader.precision == nullptr) {
    return std::nullopt;
  }
  try {
    reader.context = context();
    reader.cuda = backend("cuda");
    reader.matmul = op("matmul");
    reader.tf32 = precision("tf32");
    // If two names map to one enumerator, the translation cannot be trusted.
    if (same(reader.tf32, precision("ieee"))) return std::nullopt;
    reader.allows_tf32();  // throws if this torch has no such setting
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return reader;
#endif
}

}  // namespace

bool tf32_allowed() {
  static const std::optional<PrecisionReader> reader = find_precision_reader();
  return reader && reader->allows_tf32();
}

bool deterministic_algorithms() {
  using GlobalContext = const void* (*)();
  using Reader = bool (*)(const void* context);
  static const auto context =
      reinterpret_cast<GlobalContext>(pytorch_symbol("_ZN2at13globalContextEv"));
  static const auto reader =
      reinterpret_cast<Reader>(pytorch_symbol("_ZNK2at7Context23deterministicAlgorithmsEv"));
  return context == nullptr || reader == nullptr || reader(context());
}

}  // namespace torch_cubin
