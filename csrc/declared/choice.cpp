#include "declared/choice.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cubin/error.h"
#include "declared/tuning.h"

namespace torch_cubin {

using nlohmann::json;

auto Contract::Choice::choose() const -> const Launch& {
  if (contract_.watched_.load(std::memory_order_relaxed) != 0) return watched_choice();
  const Launch& chosen = first_choice();
  const TunedCalls& tuned = contract_.tuned_calls(state_.device);
  if (!tuned.empty()) {
    const int32_t i = tuned.find(state_, contract_.call_key_, chosen.number);
    if (i >= 0) {
      const Launch& launch = contract_.launches_[static_cast<size_t>(i)];
      if (&launch == &chosen) return chosen;
      if (launch.fits(state_)) return launch;
    }
  }
  return chosen;
}

auto Contract::Choice::watched_choice() const -> const Launch& {
  CallWatch& watch = call_watch();
  if (watch.contract != &contract_) return first_choice();
  const auto fits = [&](const Launch& launch) {
    try {
      return launch.fits(state_) && has_shared_memory(launch);
    } catch (const Error&) {
      return false;  // the condition has no value for this call
    }
  };
  if (watch.forced >= 0) {
    const Launch& launch = contract_.launches_.at(static_cast<size_t>(watch.forced));
    if (!fits(launch)) refuse_choice();
    return launch;
  }
  const Launch& chosen = first_choice();
  const json& kernels = contract_.definition_["kernels"];
  const auto condition = [&](size_t i) { return kernels[i].value("when", json()); };
  const size_t own = chosen.number;
  json fitting = json::array(), same = json::array();
  for (size_t i = 0; i < contract_.launches_.size(); ++i) {
    if (i != own && !fits(contract_.launches_[i])) continue;
    fitting.push_back(i);
    if (condition(i) == condition(own)) same.push_back(i);
  }
  watch.calls.push_back({{"device", state_.device},
                         {"key", contract_.call_key_.shown(state_)},
                         {"chosen", own},
                         {"fits", std::move(fitting)},
                         {"same", std::move(same)}});
  return chosen;
}

bool Contract::Choice::has_shared_memory(const Launch& launch) const {
  if (contract_.reads_outputs_) return true;
  return launch.shared_memory->evaluate(state_.arguments()).integer <=
         device(state_.device).shared_optin;
}

auto Contract::Choice::first_choice() const -> const Launch& {
  if (contract_.lookup_) {
    const Launch* found = nullptr;
    const bool looked_up = contract_.lookup_->find(state_, [&](size_t i) {
      const Launch& launch = contract_.launches_[i];
      if (launch.fits(state_)) found = &launch;
      return found != nullptr;
    });
    if (found != nullptr) return *found;
    if (looked_up) refuse_choice();
  }
  if (!contract_.tuned_) {
    for (const Launch& launch : contract_.launches_) {
      if (launch.fits(state_)) return launch;
    }
    refuse_choice();
  }
  const TunedTable& tuned = *contract_.tuned_;
  for (const int32_t group : {tuned.find(state_), tuned.otherwise()}) {
    for (const size_t i : contract_.groups_[static_cast<size_t>(group)]) {
      if (contract_.launches_[i].fits(state_)) return contract_.launches_[i];
    }
  }
  refuse_choice();
}

void Contract::Choice::refuse_choice() const {
  constexpr size_t kMost = 4, kNearest = 3;
  std::vector<std::string> expected, got;
  const auto add = [](std::vector<std::string>& list, const std::string& text) {
    if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(text);
  };
  const Launch* elsewhere = nullptr;  // a kernel for other GPUs
  std::vector<const Launch*> here;
  for (const Launch& launch : contract_.launches_) {
    if (launch.runs_on(state_.device)) {
      here.push_back(&launch);
    } else {
      elsewhere = &launch;
    }
  }
  const bool many = here.size() > kMost;
  if (many) here = nearest(here, kNearest);
  for (const Launch* launch : here) {
    if (many) {
      const KernelLookup::Difference lacks = difference(*launch);
      if (lacks.parts > 0) {
        add(expected, lacks.expected + " for kernel '" + launch->kernel->name() + "'");
        for (const std::string& value : lacks.got) add(got, value);
        continue;
      }
    } else if (launch->when && launch->when->evaluate(state_.arguments()).integer == 0) {
      add(expected, launch->when->text());
      continue;
    }
    for (const Requirement& requirement : launch->requirements) {
      if (requirement.holds(state_)) continue;
      add(expected, requirement.expected());
      add(got, requirement.got(state_));
      break;
    }
  }
  // If no kernel runs on this device, requesting one throws [arch] with the available archs.
  if (expected.empty() && elsewhere != nullptr) {
    elsewhere->module->info(device(state_.device), elsewhere->kernel->name());
  }
  const auto joined = [&](const std::vector<std::string>& list, const char* between) {
    std::string text;
    for (size_t i = 0; i < std::min(list.size(), kMost); ++i) {
      text += (i > 0 ? between : "") + list[i];
    }
    return list.size() > kMost ? text + " and others" : text;
  };
  std::string all = joined(expected, " or ");
  if (many) all += ", the nearest of " + std::to_string(contract_.launches_.size()) + " kernels";
  fail({"input", contract_.op_, "has no kernel for these arguments", all,
        got.empty() ? "none of them" : joined(got, ", "), ""});
}

KernelLookup::Difference Contract::Choice::difference(const Launch& launch) const {
  if (!launch.when) return {};
  const json& kernel = contract_.definition_["kernels"][launch.number];
  return KernelLookup::difference(kernel["when"], contract_.argument_scope_, state_);
}

auto Contract::Choice::nearest(const std::vector<const Launch*>& launches, size_t count) const
    -> std::vector<const Launch*> {
  std::vector<std::pair<size_t, const Launch*>> ranked;
  for (const Launch* launch : launches) {
    size_t lacks = difference(*launch).parts;
    for (const Requirement& requirement : launch->requirements) {
      if (lacks == 0 && !requirement.holds(state_)) lacks = 1;
    }
    ranked.emplace_back(lacks, launch);
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<const Launch*> out;
  for (size_t i = 0; i < std::min(count, ranked.size()); ++i) out.push_back(ranked[i].second);
  return out;
}

}  // namespace torch_cubin
