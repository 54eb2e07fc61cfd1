#include "package/kept_error.h"

#include <mutex>
#include <utility>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

std::mutex g_mutex;  // guards the error

// Leaked on purpose: calls may come while the process ends.
std::pair<std::string, std::string>& slot() {
  static auto* const error = new std::pair<std::string, std::string>;
  return *error;
}

}  // namespace

std::atomic<bool> g_error_kept{false};

void keep_error(const std::string& tag, const std::string& message) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!slot().first.empty()) return;
  slot() = {tag, message};
  g_error_kept.store(true);
}

bool take_kept_error(std::string* tag, std::string* message) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_error_kept.store(false);
  *tag = slot().first;
  *message = slot().second;
  return !tag->empty();
}

void raise_kept_error_now() {
  if (!g_error_kept.exchange(false)) return;  // another thread was first
  std::string tag, message;
  if (take_kept_error(&tag, &message)) fail_with_text(tag, message);
}

}  // namespace torch_cubin
