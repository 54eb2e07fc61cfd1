// The target of a row in cross entropy.
#pragma once

#include <limits>

#include "losses_params.h"
#include "rows.cuh"

namespace torch_cubin {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Target {
  tc_int64 column;  // of all classes
  bool ignored, valid;
  float weight;   // of its class; NaN without one, 0 if ignored
  float uniform;  // label_smoothing / classes

  TC_DEVICE Target(const LossesParams& p, tc_int64 column)
      : column(column),
        ignored(column == p.ignore_index),
        valid(!ignored && column >= 0 && column < p.classes),
        weight(ignored ? 0.0f : kNaN),
        uniform(p.label_smoothing / static_cast<float>(p.classes)) {
    if (valid) weight = p.weight == nullptr ? 1.0f : element_of(p.weight, p.weight_dtype, column);
  }
};

}  // namespace torch_cubin
