#include "ops/attention/problem/options.h"

namespace torch_cubin {

const std::vector<OptionEntry<AttentionOptions>>& AttentionOptions::entries() {
  using Options = AttentionOptions;
  static const std::vector<OptionEntry<Options>> all = {TC_ATTENTION_OPTIONS(TC_OPTION_ENTRY)};
  return all;
}

AttentionViews views_of(const AttentionOptions& options) {
  AttentionViews views;
  TC_ATTENTION_OPTIONS(TC_OPTION_OPENED)
  views.e4m3 = options.e4m3;
  return views;
}

}  // namespace torch_cubin
