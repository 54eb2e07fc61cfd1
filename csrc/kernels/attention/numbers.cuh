// Constants of softmaxes. Exponentials are powers of two on the device, logsumexp is natural.
#pragma once

namespace torch_cubin {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLowest = -3.4028234663852886e38f;  // replaces -inf where -inf - -inf must be 0
constexpr float kLeast = -3e38f;                    // the smallest reference of a row with scores
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace torch_cubin
