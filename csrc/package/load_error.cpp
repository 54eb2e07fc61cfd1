#include "package/load_error.h"

#include <mutex>
#include <utility>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

std::mutex g_mutex;  // guards the error

// Never freed: calls may come during process exit.
std::pair<std::string, std::string>& load_error() {
  static auto* const error = new std::pair<std::string, std::string>;
  return *error;
}

}  // namespace

std::atomic<bool> g_has_load_error{false};

void keep_load_error(const std::string& tag, const std::string& message) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!load_error().first.empty()) return;
  load_error() = {tag, message};
  g_has_load_error.store(true);
}

bool take_load_error(std::string* tag, std::string* message) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_has_load_error.store(false);
  *tag = load_error().first;
  *message = load_error().second;
  return !tag->empty();
}

void raise_load_error_now() {
  if (!g_has_load_error.exchange(false)) return;  // another thread was first
  std::string tag, message;
  if (take_load_error(&tag, &message)) fail_with_text(tag, message);
}

}  // namespace torch_cubin
