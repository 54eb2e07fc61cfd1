// A program without Python that runs ops of PyTorch's dispatcher: an op that a package declares
// (torch_cubin.save_package), and torch_cubin's own product, linear layer and attention.
//
//   run_ops PACKAGE [--launch-only]         (its op is cpp_package::vec_add)
#include <torch_cubin/torch.h>

#include "support.h"

using namespace torch_cubin;

namespace {

Tensor to_device(const std::vector<float>& host, std::vector<int64_t> sizes) {
  AtenTensorHandle made = nullptr;
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes[i];
  aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                           aoti_torch_dtype_float32(), aoti_torch_device_type_cuda(), 0, &made);
  Tensor tensor(made);
  copy(tensor.mutable_data_ptr(), host.data(), host.size() * 4, current_stream(0), 0);
  return tensor;
}

std::vector<float> to_host(const Tensor& tensor) {
  std::vector<float> host(static_cast<size_t>(tensor.numel()));
  copy(host.data(), tensor.const_data_ptr(), host.size() * 4, current_stream(0), 0);
  synchronize(current_stream(0), 0);
  return host;
}

std::vector<float> numbers(size_t count, size_t seed) {
  std::vector<float> made(count);
  for (size_t i = 0; i < count; ++i) {
    made[i] = static_cast<float>(example::small_number(i * 3 + seed));
  }
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return example::usage("run_ops PACKAGE [--launch-only]");
  try {
    load_package(arguments[1]);
    const bool launch_only = count > 2;

    constexpr int m = 48, n = 40, k = 64;
    const std::vector<float> a = numbers(m * k, 1), b = numbers(k * n, 2), bias = numbers(n, 3);
    const Tensor x = to_device(a, {m, k}), w = to_device(b, {k, n});
    const Tensor sum = call<Tensor>("cpp_package::vec_add", x, x);
    const Tensor product = ops::matmul(x, w);
    const Tensor layer = ops::linear(x, to_device(b, {n, k}), to_device(bias, {n}), "relu");
    const Tensor attended = ops::attention(x, x, x);
    if (launch_only) return 0;

    std::vector<double> sums, products(m * n), layers(m * n), rows;
    for (const float value : a) sums.push_back(2 * value);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double linear = bias[j];
        for (int l = 0; l < k; ++l) {
          products[i * n + j] += double{a[i * k + l]} * b[l * n + j];
          linear += double{a[i * k + l]} * b[j * k + l];
        }
        layers[i * n + j] = linear > 0 ? linear : 0;
      }
    }
    for (int i = 0; i < m; ++i) {
      std::vector<double> scores(m), row(k);
      double most = -1e30, total = 0;
      for (int j = 0; j < m; ++j) {
        for (int l = 0; l < k; ++l) scores[j] += double{a[i * k + l]} * a[j * k + l] / 8;
        most = std::fmax(most, scores[j]);
      }
      for (int j = 0; j < m; ++j) {
        const double weight = std::exp(scores[j] - most);
        total += weight;
        for (int l = 0; l < k; ++l) row[l] += weight * a[j * k + l];
      }
      for (const double value : row) rows.push_back(value / total);
    }
    int wrong = example::compare("cpp_package::vec_add", to_host(sum), sums, 0);
    wrong += example::compare("ops::matmul", to_host(product), products, 0);
    wrong += example::compare("ops::linear, relu", to_host(layer), layers, 0);
    wrong += example::compare("ops::attention", to_host(attended), rows, 1e-3);
    return wrong == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
