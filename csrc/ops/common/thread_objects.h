// Objects that PyTorch passes from a thread to the threads that compute its gradients
// (torch_cubin/_pytorch/thread_objects.py stores them): only their presence matters.
#pragma once

#include <string>

namespace torch_cubin {

// Whether this thread has the object; `removes` it.
bool thread_object_exists(const std::string& key, bool removes = false);

// Removes the object if this thread has it.
void forget_thread_object(const char* key) noexcept;

}  // namespace torch_cubin
