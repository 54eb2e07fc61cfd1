// Maps a score q . k to the logit that enters the softmax (scale, softcap, ALiBi and mask, in this
// order), and its derivative, with dropout. All kernels that compute attention use it.
//
//   logit = softcap tanh(scale score / softcap) + alibi + mask     (softcap 0: without the tanh)
//   prob = exp(logit - logsumexp)
//   weight = keep prob                                (keep: dropout's factor, 0 or keep_scale)
//   d logit = prob (keep d weight - delta)
//   d score = scale (1 - tanh^2) d logit              (the caller multiplies by scale)
//
// Kernels differ in which elements a thread holds and in the fastest order to visit them. So the
// caller passes `each`: each(f) calls f(x, grad, i, j, at) for all its elements. x is the value
// that is transformed from score to weight, grad its gradient, (i, j) the element's row and column,
// and `at` an index for the caller's own functions. `rarely` is a second `each`, for features that
// few calls use: it may trade speed for code size.
//
// A Rule has what RuleOf has, and cap_tanh(x), the hyperbolic tangent of x / cap(), alibi(x, i, j),
// has_mask() and masked(x, i, j).
#pragma once

#include "ptx.cuh"
#include "score_params.h"

namespace torch_cubin {

// The numbers of a Rule. Params: a reference to a kernel's parameter, or a copy of its numbers.
template <class Params>
struct RuleOf {
  Params p;

  TC_DEVICE auto scale() const { return p.scale; }
  TC_DEVICE auto cap() const { return p.softcap; }  // 0: none
  TC_DEVICE bool has_alibi() const { return torch_cubin::has_alibi(p); }
};

// Transforms scores to logits, and multiplies grad by the derivative of the softcap.
template <class Rule, class Each, class Rarely>
TC_DEVICE void apply_rule(const Rule& rule, Each&& each, Rarely&& rarely) {
  each([&](auto& x, auto&, int, int, int) { x *= rule.scale(); });
  if (rule.cap() != 0) {
    rarely([&](auto& x, auto& grad, int, int, int) {
      auto tanh = rule.cap_tanh(x);
      x = rule.cap() * tanh;
      grad *= 1 - tanh * tanh;
    });
  }
  if (rule.has_alibi()) {
    rarely([&](auto& x, auto&, int i, int j, int) { x = rule.alibi(x, i, j); });
  }
  if (rule.has_mask()) {
    rarely([&](auto& x, auto&, int i, int j, int) { x = rule.masked(x, i, j); });
  }
}

// Transforms scores to weights, and the weights' gradients to the scores' gradients (without the
// scale). keep(at), used only if `drops`, and delta(at) belong to the element `at`. fetch() runs
// between them, for loads whose latency the scaling hides. hide() sets the logits outside the band
// to -inf; prob(logit, at) is the last step.
template <class Rule, class Each, class Rarely, class Keep, class Fetch, class Delta, class Hide,
          class Prob>
TC_DEVICE void differentiate_rule(const Rule& rule, bool drops, Each&& each, Rarely&& rarely,
                                  Keep&& keep, Fetch&& fetch, Delta&& delta, Hide&& hide,
                                  Prob&& prob) {
  if (drops) each([&](auto&, auto& grad, int, int, int at) { grad *= keep(at); });
  fetch();
  each([&](auto&, auto& grad, int, int, int at) { grad -= delta(at); });
  apply_rule(rule, each, rarely);
  hide();
  each([&](auto& x, auto& grad, int, int, int at) {
    x = prob(x, at);
    grad *= x;
  });
  if (drops) each([&](auto& x, auto&, int, int, int at) { x *= keep(at); });
}

}  // namespace torch_cubin
