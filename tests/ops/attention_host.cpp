// The CUDA half of attention's host code, without a GPU: attention.cpp and its neighbours are
// compiled here with the device taken away, so that they lay out, copy, merge, split and launch
// CPU tensors; and each "launch" runs its kernel's contract
// (csrc/kernels/attention/attention_params.h) as plain loops. Registered as torch.ops.cubin_host.*
// for test_attention_host.py. One long file, because the sources that it includes at its end must
// see what takes the device's place.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/attention/attention_params.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/api/signatures.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/portable/decode.h"
#include "ops/attention/problem/operands.h"

namespace torch_cubin {
namespace host_check {

[[noreturn]] void broken(const std::string& what) { throw std::runtime_error("contract: " + what); }
void require(bool holds, const char* what) {
  if (!holds) broken(what);
}

const Device& a_device(int index) {
  static Device device;
  device.index = index;
  device.multiprocessors = 4;
  device.bytes_per_cycle = 100;
  return device;
}

// Fresh memory is full of NaN (of huge counters): what no kernel writes is found.
Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype),
                               aoti_torch_device_type_cpu(), 0, &handle) != AOTI_TORCH_SUCCESS) {
    broken("allocation");
  }
  Tensor out(handle);
  int64_t bytes = element_size(dtype);
  for (int64_t i = 0; i < dim; ++i) bytes *= sizes[i];
  if (bytes > 0) std::fill_n(static_cast<unsigned char*>(out.mutable_data_ptr()), bytes, 0xFF);
  return out;
}

Tensor empty(const int64_t* sizes, int64_t dim, ScalarType dtype) {
  std::vector<int64_t> strides(static_cast<size_t>(dim));
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(sizes, strides.data(), dim, dtype);
}

// What Emulated must know of a kernel, which the manifest says.
struct Emulation {
  std::string name, step, math, layout;
  int64_t tile[3];
};

std::map<const PackageKernel*, Emulation>& emulations() {
  static std::map<const PackageKernel*, Emulation> all;
  return all;
}

// Of "gradient_keys" the kind is "gradient", and `of` "keys".
PackageKernel* make_kernel(const std::string& step, const char* math, const char* layout, int rows,
                           int columns, int depth) {
  const std::string name = step + "_" + math + "_" + layout;
  const size_t split = step.find('_');
  const std::string kind = step.substr(0, split);
  const std::string of = split == std::string::npos ? "" : step.substr(split + 1);
  const std::string header = kind == "decode"    ? "attention/decode/decode"
                             : kind == "combine" ? "attention/portable/combine"
                                                 : "attention";
  nlohmann::json takes = nlohmann::json::array();
  const bool full = std::string(layout) == "full", general = std::string(layout) == "general";
  for (const char* feature : kAttentionFeatures) {
    const bool plain = std::string(feature) == "plain";
    if (full ? plain : !plain || !general || kind == "decode") takes.push_back(feature);
  }
  const nlohmann::json entry = {{"name", name},
                                {"family", "attention"},
                                {"kind", kind},
                                {"of", of},
                                {"arch", "sm_90a"},
                                {"file", "none.cubin"},
                                {"sha256", ""},
                                {"symbol", name},
                                {"math", math},
                                {"layout", layout},
                                {"takes", takes},
                                {"tile", {rows, columns, depth}},
                                {"stages", 1},
                                {"block", {128, 1, 1}},
                                {"cluster", {1, 1, 1}},
                                {"dynamic_shared", 0},
                                {"blocks_per_multiprocessor", 2},
                                {"cost", {{"k_tile", 100}, {"fixed", 100}}},
                                {"params", nlohmann::json::array()},
                                {"params_header", header}};
  // One a table, for the life of the process.
  auto* kernel = new PackageKernel(entry, nullptr);
  emulations()[kernel] = {name, step, math, layout, {rows, columns, depth}};
  return kernel;
}

std::vector<PackageKernel*> make_kernels() {
  std::vector<PackageKernel*> all;
  for (const char* math : {"float16", "bfloat16", "float32"}) {
    const bool is_float32 = std::string(math) == "float32";
    for (const char* variant : {"full", "general"}) {
      for (int depth : {16, 48}) {
        all.push_back(make_kernel("forward", math, variant, 32, 32, depth));
        if (!is_float32) all.push_back(make_kernel("backward", math, variant, 16, 32, depth));
      }
    }
    if (is_float32) {
      for (int depth : {16, 48}) {
        all.push_back(make_kernel("gradient_keys", math, "any", 16, 32, depth));
        all.push_back(make_kernel("gradient_queries", math, "any", 32, 16, depth));
      }
    } else {
      all.push_back(make_kernel("decode", math, "general", 16, 32, 48));
      all.push_back(make_kernel("convert", math, "any", 64, 1, 1));
    }
    all.push_back(make_kernel("combine", math, "any", 8, 1, 1));
    all.push_back(make_kernel("delta", math, "any", 32, 1, 1));
  }
  return all;
}

// The library's own backends, with kernels that are plain loops.
AttentionKernels make_backends() {
  AttentionKernels made;
  const std::vector<PackageKernel*> all = make_kernels();
  for (const KernelBackend* each = KernelBackend::first(); each != nullptr; each = each->next()) {
    if (std::string(each->family()) != "attention") continue;
    const auto& backend = static_cast<const AttentionBackend&>(*each);
    std::vector<PackageKernel*> own;
    for (PackageKernel* kernel : all) {
      if (backend.owns(kernel->entry())) own.push_back(kernel);
    }
    backend.make(a_device(0), AttentionEntries(a_device(0), own), made);
  }
  return made;
}

const AttentionKernels& the_backends() {
  static const AttentionKernels backends = make_backends();
  return backends;
}

// --- the kernels' contracts
// -----------------------------------------------------------------------

using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;

std::vector<std::string>& launches() {
  static std::vector<std::string> all;
  return all;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T>
struct Emulated {
  const AttentionParams& p;
  const Emulation& kernel;

  struct Sequence {
    int64_t b, q0 = 0, k0 = 0, rows, columns, first, last;
  };
  Sequence sequence(int64_t b) const {
    Sequence s = {b, 0, 0, p.seqlen_q, p.seqlen_k, p.first, p.last};
    if (p.cu_seqlens_q != nullptr) {
      s.q0 = p.cu_seqlens_q[b];
      s.rows = p.cu_seqlens_q[b + 1] - s.q0;
      s.k0 = p.cu_seqlens_k[b];
      s.columns = p.cu_seqlens_k[b + 1] - s.k0;
      require(s.rows <= p.seqlen_q && s.columns <= p.seqlen_k, "lengths are upper bounds");
    }
    const int64_t shift = p.flags & kAttendBottomRight ? s.columns - s.rows : 0;
    if (s.first > -kNoBound) s.first += shift;
    if (s.last < kNoBound) s.last += shift;
    return s;
  }
  template <typename P>
  P* row(P* base, const tc_int64 (&stride)[3], int64_t b, int64_t h, int64_t i) const {
    return base + (p.cu_seqlens_q ? 0 : b * stride[0]) + h * stride[1] + i * stride[2];
  }
  const T* q(const Sequence& s, int64_t h, int64_t i) const {
    return row(static_cast<const T*>(p.q), p.q_stride, s.b, h, s.q0 + i);
  }
  const T* k(const Sequence& s, int64_t h, int64_t j) const {
    return row(static_cast<const T*>(p.k), p.k_stride, s.b, h / p.group, s.k0 + j);
  }
  const T* v(const Sequence& s, int64_t h, int64_t j) const {
    return row(static_cast<const T*>(p.v), p.v_stride, s.b, h / p.group, s.k0 + j);
  }
  int64_t index(const Sequence& s, int64_t h, int64_t i) const {
    if (p.cu_seqlens_q != nullptr) return h * p.total_q + s.q0 + i;
    return (s.b * p.heads + h) * p.seqlen_q + i;
  }

  static double dot(const T* a, const T* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += static_cast<double>(static_cast<float>(a[i])) * static_cast<float>(b[i]);
    }
    return sum;
  }

  // The score of (i, j), -inf where hidden; and its derivative by the dot product.
  double score(const Sequence& s, int64_t h, int64_t i, int64_t j, double* slope = nullptr) const {
    if (j < i + s.first || j > i + s.last) return -INFINITY;
    double x = dot(q(s, h, i), k(s, h, j), p.head_dim) * p.scale, derivative = p.scale;
    if (p.softcap > 0) {
      const double t = std::tanh(x / p.softcap);
      x = p.softcap * t;
      derivative *= 1 - t * t;
    }
    if (p.alibi_slopes != nullptr) {
      x -= p.alibi_slopes[s.b * p.alibi_stride + h] *
           std::abs(static_cast<double>(i + s.columns - s.rows - j));
    }
    if (p.mask != nullptr) {
      const int64_t at = s.b * p.mask_stride[0] + h * p.mask_stride[1] + i * p.mask_stride[2] +
                         j * p.mask_stride[3];
      if (p.flags & kAttendBoolMask) {
        x += static_cast<const bool*>(p.mask)[at] ? 0 : -INFINITY;
      } else if (p.flags & kAttendFloatMask) {
        x += static_cast<const float*>(p.mask)[at];
      } else {
        require(p.flags & kAttendOwnMask, "the mask's kind");
        x += static_cast<float>(static_cast<const T*>(p.mask)[at]);
      }
    }
    if (slope != nullptr) *slope = derivative;
    return x;
  }
  double kept(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    if (!(p.flags & kAttendDropout)) return 1;
    const DropoutBits of_block(static_cast<uint64_t>(*p.dropout_seed), s.b * p.heads + h, i, j / 32,
                               j % 8 / 2);
    const int bits = of_block.number(static_cast<int>(j % 32 / 8), static_cast<int>(j % 2));
    return bits >= p.drop_below ? p.keep_scale : 0;
  }

  void check_operand(const void* data, const tc_int64 (&stride)[3]) const {
    require(reinterpret_cast<uintptr_t>(data) % 16 == 0, "bases are aligned");
    const bool used[] = {p.batch > 1 && !p.cu_seqlens_q, p.heads > 1,
                         p.seqlen_q > 1 || p.seqlen_k > 1};
    for (int i = 0; i < 3; ++i) {
      require(!used[i] || stride[i] * sizeof(T) % 16 == 0, "rows are whole vectors");
    }
  }
  void check() const {
    require(p.head_dim * sizeof(T) % 16 == 0 && p.head_dim_v * sizeof(T) % 16 == 0, "head dims");
    require(p.head_dim <= kernel.tile[2] && p.head_dim_v <= kernel.tile[2], "a wide enough tile");
    check_operand(p.q, p.q_stride);
    check_operand(p.k, p.k_stride);
    check_operand(p.v, p.v_stride);
    check_operand(p.out, p.out_stride);
    if (kernel.layout == "full") {
      require(p.mask == nullptr && !(p.flags & kAttendDropout) && p.softcap == 0 &&
                  p.alibi_slopes == nullptr && p.sinks == nullptr && p.scale > 0,
              "the full variant knows none of this");
    }
  }

  void forward(int64_t blocks, int splits) const {
    check();
    const bool packed = kernel.step == "decode";
    const int64_t rows = packed ? int64_t{p.seqlen_q} * p.group : p.seqlen_q;
    const int64_t heads = packed ? p.heads / p.group : p.heads;
    require(blocks == ceil_div(rows, kernel.tile[0]) * heads * p.batch, "the grid");
    require(splits == p.splits, "splits");
    if (splits > 1) require(p.columns_per_split % kernel.tile[1] == 0, "whole tiles a split");
    require(int64_t{p.columns_per_split} * splits >= p.seqlen_k, "all columns");
    for (int part = 0; part < splits; ++part) {
      for (int64_t b = 0; b < p.batch; ++b) {
        const Sequence s = sequence(b);
        const int64_t begin = splits > 1 ? int64_t{part} * p.columns_per_split : 0;
        const int64_t end =
            splits > 1 ? std::min(s.columns, begin + p.columns_per_split) : s.columns;
        for (int64_t h = 0; h < p.heads; ++h) {
          for (int64_t i = 0; i < s.rows; ++i) one_row(s, h, i, begin, end, part);
        }
      }
    }
  }

  void one_row(const Sequence& s, int64_t h, int64_t i, int64_t begin, int64_t end,
               int part) const {
    std::vector<double> x;
    double most = p.splits == 1 && p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    for (int64_t j = begin; j < end; ++j) {
      x.push_back(score(s, h, i, j));
      most = std::max(most, x.back());
    }
    double sum = p.splits == 1 && p.sinks != nullptr ? std::exp(p.sinks[h] - most) : 0;
    std::vector<double> out(static_cast<size_t>(p.head_dim_v));
    for (int64_t j = begin; j < end && most > -INFINITY; ++j) {
      const double w = std::exp(x[j - begin] - most);
      sum += w;
      const double kept_w = w * kept(s, h, i, j);
      const T* values = v(s, h, j);
      for (int64_t c = 0; c < p.head_dim_v; ++c) out[c] += kept_w * static_cast<float>(values[c]);
    }
    const double lse = most > -INFINITY ? most + std::log(sum) : -INFINITY;
    if (p.splits > 1) {
      const int64_t at = ((int64_t{part} * p.batch + s.b) * p.heads + h) * p.seqlen_q + i;
      p.partial_logsumexp[at] = static_cast<float>(lse);
      for (int64_t c = 0; c < p.head_dim_v; ++c) {
        p.partial_out[at * p.head_dim_v + c] = static_cast<float>(sum > 0 ? out[c] / sum : 0);
      }
      return;
    }
    store(s, h, i, out, sum, lse);
  }

  void store(const Sequence& s, int64_t h, int64_t i, const std::vector<double>& out, double sum,
             double lse) const {
    if (p.logsumexp != nullptr) p.logsumexp[index(s, h, i)] = static_cast<float>(lse);
    T* to = row(static_cast<T*>(p.out), p.out_stride, s.b, h, s.q0 + i);
    for (int64_t c = 0; c < p.head_dim_v; ++c)
      to[c] = static_cast<float>(sum > 0 ? out[c] / sum : 0);
  }

  void combine(int64_t blocks) const {
    const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q;
    require(blocks == ceil_div(rows, kernel.tile[0]), "the combine grid");
    for (int64_t n = 0; n < rows; ++n) {
      const Sequence s = sequence(n / p.seqlen_q / p.heads);
      const int64_t h = n / p.seqlen_q % p.heads, i = n % p.seqlen_q;
      double most = p.sinks != nullptr ? p.sinks[h] : -INFINITY, sum = 0;
      for (int part = 0; part < p.splits; ++part) {
        most = std::max(most, static_cast<double>(p.partial_logsumexp[part * rows + n]));
      }
      if (p.sinks != nullptr) sum += std::exp(p.sinks[h] - most);
      std::vector<double> out(static_cast<size_t>(p.head_dim_v));
      for (int part = 0; part < p.splits && most > -INFINITY; ++part) {
        const double w = std::exp(p.partial_logsumexp[part * rows + n] - most);
        sum += w;
        for (int64_t c = 0; c < p.head_dim_v; ++c) {
          out[c] += w * p.partial_out[(part * rows + n) * p.head_dim_v + c];
        }
      }
      store(s, h, i, out, sum, most > -INFINITY ? most + std::log(sum) : -INFINITY);
    }
  }

  const T* grad(const Sequence& s, int64_t h, int64_t i) const {
    return row(static_cast<const T*>(p.grad_out), p.grad_out_stride, s.b, h, s.q0 + i);
  }

  template <class Body>
  void each_row(Body body) const {
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence(b);
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t i = 0; i < s.rows; ++i) body(s, h, i);
      }
    }
  }

  void delta(int64_t blocks) const {
    require(blocks == ceil_div(p.seqlen_q, kernel.tile[0]) * p.batch * p.heads, "the delta grid");
    require(kernel.tile[0] == 32, "a counter for every block");
    for (int64_t i = 0; i < blocks && p.dq_turn != nullptr; ++i) p.dq_turn[i] = 0;
    check_operand(p.grad_out, p.grad_out_stride);
    each_row([&](const Sequence& s, int64_t h, int64_t i) {
      const T* out = row(static_cast<const T*>(p.out), p.out_stride, s.b, h, s.q0 + i);
      const_cast<float*>(p.delta)[index(s, h, i)] =
          static_cast<float>(dot(grad(s, h, i), out, p.head_dim_v));
    });
  }

  // dq_sum here: (batch, head, row) in this file's own order, in a buffer of the true size.
  int64_t sum_at(const Sequence& s, int64_t h, int64_t i) const {
    if (p.cu_seqlens_q != nullptr) {
      const int64_t total = p.cu_seqlens_q[p.batch];
      return (h * (total / 16 + p.batch) * 16 + s.q0 + i) * p.head_dim;
    }
    return ((s.b * p.heads + h) * ceil_div(p.seqlen_q, 16) * 16 + i) * p.head_dim;
  }

  // body(sequence, head, row, column, weight with dropout in it, dS) for every pair that counts.
  template <class Body>
  void each_pair(Body body) const {
    each_row([&](const Sequence& s, int64_t h, int64_t i) {
      for (int64_t j = 0; j < s.columns; ++j) {
        double slope = 0;
        const double x = score(s, h, i, j, &slope), lse = p.logsumexp[index(s, h, i)];
        if (x == -INFINITY || lse == -INFINITY) continue;
        const double w = std::exp(x - lse), keep = kept(s, h, i, j);
        const double dp = dot(grad(s, h, i), v(s, h, j), p.head_dim_v) * keep;
        body(s, h, i, j, w * keep, w * (dp - p.delta[index(s, h, i)]) * slope);
      }
    });
  }

  // dk and dv.
  void gradient_k(int64_t blocks) const {
    check();
    require(blocks == ceil_div(p.seqlen_k, kernel.tile[1]) * (p.heads / p.group) * p.batch,
            "the grid of keys");
    check_operand(p.dk, p.dk_stride);
    check_operand(p.dv, p.dv_stride);
    std::map<T*, std::vector<double>> sums;  // of dk and dv rows
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence(b);
      for (int64_t h = 0; h < p.heads / p.group; ++h) {
        for (int64_t j = 0; j < s.columns; ++j) {
          sums[dk(s, h * p.group, j)].resize(static_cast<size_t>(p.head_dim));
          sums[dv(s, h * p.group, j)].resize(static_cast<size_t>(p.head_dim_v));
        }
      }
    }
    each_pair([&](const Sequence& s, int64_t h, int64_t i, int64_t j, double weight, double ds) {
      std::vector<double>&k_sum = sums[dk(s, h, j)], &v_sum = sums[dv(s, h, j)];
      const T *q_row = q(s, h, i), *grad_row = grad(s, h, i);
      for (size_t c = 0; c < v_sum.size(); ++c)
        v_sum[c] += weight * static_cast<float>(grad_row[c]);
      for (size_t c = 0; c < k_sum.size(); ++c) k_sum[c] += ds * static_cast<float>(q_row[c]);
    });
    for (const auto& [place, sum] : sums) {
      for (size_t c = 0; c < sum.size(); ++c) place[c] = static_cast<float>(sum[c]);
    }
  }
  T* dk(const Sequence& s, int64_t h, int64_t j) const {
    return row(static_cast<T*>(p.dk), p.dk_stride, s.b, h / p.group, s.k0 + j);
  }
  T* dv(const Sequence& s, int64_t h, int64_t j) const {
    return row(static_cast<T*>(p.dv), p.dv_stride, s.b, h / p.group, s.k0 + j);
  }

  void gradient_q(int64_t blocks) const {
    check();
    require(blocks == ceil_div(p.seqlen_q, kernel.tile[0]) * p.heads * p.batch, "the grid of rows");
    check_operand(p.dq, p.dq_stride);
    std::map<T*, std::vector<double>> sums;
    const auto dq = [&](const Sequence& s, int64_t h, int64_t i) {
      return row(static_cast<T*>(p.dq), p.dq_stride, s.b, h, s.q0 + i);
    };
    each_row([&](const Sequence& s, int64_t h, int64_t i) {
      sums[dq(s, h, i)].resize(static_cast<size_t>(p.head_dim));
    });
    each_pair([&](const Sequence& s, int64_t h, int64_t i, int64_t j, double, double ds) {
      std::vector<double>& sum = sums[dq(s, h, i)];
      const T* k_row = k(s, h, j);
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += ds * static_cast<float>(k_row[c]);
    });
    for (const auto& [place, sum] : sums) {
      for (size_t c = 0; c < sum.size(); ++c) place[c] = static_cast<float>(sum[c]);
    }
  }

  // dk and dv, and dq_sum.
  void backward(int64_t blocks) const {
    gradient_k(blocks);
    each_row([&](const Sequence& s, int64_t h, int64_t i) {
      std::fill_n(p.dq_sum + sum_at(s, h, i), p.head_dim, 0.0f);
    });
    each_pair([&](const Sequence& s, int64_t h, int64_t i, int64_t j, double, double ds) {
      const T* k_row = k(s, h, j);
      for (int64_t c = 0; c < p.head_dim; ++c) {
        p.dq_sum[sum_at(s, h, i) + c] +=
            static_cast<float>(ds / p.scale * static_cast<float>(k_row[c]));
      }
    });
  }

  void convert(int64_t blocks) const {
    const int64_t warps = 128 / 32;
    require(blocks == ceil_div(p.batch * p.heads * ceil_div(p.seqlen_q, 16), warps),
            "the convert grid");
    check_operand(p.dq, p.dq_stride);
    each_row([&](const Sequence& s, int64_t h, int64_t i) {
      T* to = row(static_cast<T*>(p.dq), p.dq_stride, s.b, h, s.q0 + i);
      for (int64_t c = 0; c < p.head_dim; ++c) to[c] = p.dq_sum[sum_at(s, h, i) + c] * p.scale;
    });
  }

  void run(int64_t blocks, int splits) const {
    if (kernel.step == "forward" || kernel.step == "decode") return forward(blocks, splits);
    require(splits == 1, "one split");
    if (kernel.step == "combine") return combine(blocks);
    if (kernel.step == "delta") return delta(blocks);
    if (kernel.step == "backward") return backward(blocks);
    if (kernel.step == "gradient_keys") return gradient_k(blocks);
    if (kernel.step == "gradient_queries") return gradient_q(blocks);
    if (kernel.step == "convert") return convert(blocks);
    broken("an unknown kind");
  }
};

void run(PackageKernel& kernel, const AttentionParams& p, int64_t blocks, int splits) {
  const Emulation& emulated = emulations().at(&kernel);
  launches().push_back(emulated.name);
  if (emulated.math == "float16") return Emulated<Half>{p, emulated}.run(blocks, splits);
  if (emulated.math == "bfloat16") return Emulated<BFloat16>{p, emulated}.run(blocks, splits);
  return Emulated<float>{p, emulated}.run(blocks, splits);
}

}  // namespace host_check
}  // namespace torch_cubin

#define device(index) host_check::a_device(index)
#define attention_kernels(device) host_check::the_backends()
#define launch_attention(kernel, params, blocks, splits, ...) \
  host_check::run(kernel, params, blocks, splits)
#define launch_combine(combine, params, count, one_order, device) \
  host_check::run(*(combine).kernel, params, ceil_div(count, (combine).rows), 1)
#define empty_cuda(sizes, dim, dtype, device) host_check::empty(sizes, dim, dtype)
#define empty_cuda_strided(sizes, strides, dim, dtype, device) \
  host_check::empty_strided(sizes, strides, dim, dtype)
#include "ops/attention/api/cuda.cpp"
#include "ops/attention/portable/backends.cpp"
#include "ops/attention/problem/operands.cpp"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY(cubin_host, m) {
  m.def(forward_signature().schema("attention_forward").c_str());
  m.def(backward_signature().schema("attention_backward").c_str());
  m.def("launches() -> str");
}

std::string take_launches() {
  std::string text;
  for (const std::string& name : host_check::launches()) text += name + " ";
  host_check::launches().clear();
  return text;
}

STABLE_TORCH_LIBRARY_IMPL(cubin_host, CPU, m) {
  m.impl("attention_forward", boxed_forward<attention_forward_cuda, false>);
  m.impl("attention_backward", boxed_backward<attention_backward_cuda, false>);
}
STABLE_TORCH_LIBRARY_IMPL(cubin_host, CompositeExplicitAutograd, m) {
  m.impl("launches", TORCH_BOX(&take_launches));
}

}  // namespace
