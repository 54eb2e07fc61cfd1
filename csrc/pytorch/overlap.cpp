#include "pytorch/overlap.h"

#include <algorithm>

#include "pytorch/tensor.h"

namespace torch_cubin {
namespace {

constexpr int64_t kMostSteps = 4;    // candidate indices examined per dim
constexpr int kMostQuestions = 256;  // recursion budget of one comparison
// Above any memory size, and small enough that a sum of two does not overflow.
constexpr int64_t kMostBytes = int64_t{1} << 62;

struct Dim {
  int64_t stride;  // bytes
  int64_t size;    // 2 or more
};

// The byte range of a tensor, as dims sorted by descending stride.
struct Span {
  Dim dims[kMaxDims];
  size_t count = 0;
  int64_t bytes;         // from the first byte to the last
  bool possible = true;  // at most kMostBytes, and no stride is negative

  explicit Span(const MemoryFacts& facts) : bytes(facts.itemsize) {
    for (int64_t i = 0; i < facts.dim; ++i) {
      if (facts.sizes[i] < 2 || facts.strides[i] == 0) continue;
      int64_t stride = 0, length = 0;
      possible = facts.strides[i] > 0 &&
                 !__builtin_mul_overflow(facts.strides[i], facts.itemsize, &stride) &&
                 !__builtin_mul_overflow(stride, facts.sizes[i] - 1, &length) &&
                 length <= kMostBytes - bytes;
      if (!possible) return;
      dims[count++] = {stride, facts.sizes[i]};
      bytes += length;
    }
    std::sort(dims, dims + count, [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  }
};

int64_t floor_divided(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

class Question {
 public:
  Question(const Span& first, const Span& second) : first_(first), second_(second) {}

  // Whether the subtensors given by dims i.. of the first and j.. of the second tensor overlap.
  // They span `first_bytes` and `second_bytes`; `offset` is the distance from the first's start to
  // the second's.
  bool ask(size_t i, int64_t first_bytes, size_t j, int64_t second_bytes, int64_t offset) {
    if (offset >= first_bytes || offset <= -second_bytes) return false;
    if (i == first_.count && j == second_.count) return true;
    if (++asked_ > kMostQuestions) return true;
    const int64_t first_stride = i < first_.count ? first_.dims[i].stride : 0;
    const int64_t second_stride = j < second_.count ? second_.dims[j].stride : 0;
    const int64_t stride = std::max(first_stride, second_stride);
    // Iterates over the outermost dim with the larger stride, or over both dims if their strides
    // are equal. A step in the first tensor reduces the offset, a step in the second increases it.
    int64_t least = 0, most = 0;
    if (first_stride == stride) {
      most = first_.dims[i].size - 1;
      first_bytes -= most * stride;
      ++i;
    }
    if (second_stride == stride) {
      least = -(second_.dims[j].size - 1);
      second_bytes += least * stride;
      ++j;
    }
    // Steps at which the remaining dims can overlap: -second_bytes < offset - step * stride <
    // first_bytes.
    least = std::max(least, floor_divided(offset - first_bytes, stride) + 1);
    most = std::min(most, floor_divided(offset + second_bytes - 1, stride));
    if (most - least >= kMostSteps) return true;
    for (int64_t step = least; step <= most; ++step) {
      if (ask(i, first_bytes, j, second_bytes, offset - step * stride)) return true;
    }
    return false;
  }

 private:
  const Span &first_, &second_;
  int asked_ = 0;
};

}  // namespace

bool share_memory(const MemoryFacts& first, const MemoryFacts& second) {
  if (first.data == nullptr || second.data == nullptr) return false;
  const Span a(first), b(second);
  if (!a.possible || !b.possible) return true;
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(second.data) -
                                           reinterpret_cast<uintptr_t>(first.data));
  return Question(a, b).ask(0, a.bytes, 0, b.bytes, offset);
}

}  // namespace torch_cubin
