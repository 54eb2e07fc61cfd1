// The same product by a Triton kernel that was exported ahead of time (kernels/triton_matmul.py).
// The hash selects a config in the folder; the file names hold the launch facts.
//
//   matmul_triton kernels [HASH]
#include <dirent.h>
#include <torch_cubin/cubin.h>

#include "support.h"

using namespace torch_cubin;

int main(int count, char** arguments) {
  if (count < 2) return example::usage("matmul_triton kernels [HASH]");
  try {
    const std::string folder = arguments[1];
    KernelFamily family("triton_matmul.{hash}.{bm}x{bn}.shared{shared}.sm_{arch}.cubin");
    KernelFamily::Fields fields;
    DIR* open = opendir(folder.c_str());
    for (dirent* file; open != nullptr && (file = readdir(open)) != nullptr;) {
      if (!family.match(file->d_name, fields)) continue;
      family.add(file->d_name, Module::from_file(folder + "/" + file->d_name), "matmul_kernel");
    }
    if (open != nullptr) closedir(open);
    // The hash of "*fp16_*fp16_*fp32_i32_i32_i32_64_64_32warps4xstages3", as Triton makes it.
    const std::string hash = count > 2 ? arguments[2] : "6f267976";
    Kernel matmul = family.find({{"hash", hash}});
    const KernelFamily::Member& member = *family.all({{"hash", hash}}).front();

    constexpr int m = 512, n = 512, k = 512;
    std::vector<uint16_t> left(m * k), right(k * n);
    for (size_t i = 0; i < left.size(); ++i) {
      left[i] = example::to_half(static_cast<float>(example::small_number(i)));
      right[i] = example::to_half(static_cast<float>(example::small_number(5 * i + 1)));
    }
    Buffer<uint16_t> a(left), b(right);
    Buffer<float> c(static_cast<size_t>(m * n));
    // The cubin has the block size (.reqntid). Triton's kernels take two more scratch pointers.
    const auto blocks = grid(cdiv(m, member.number("bm")), cdiv(n, member.number("bn")));
    matmul(launch(blocks).shared_memory(member.number("shared")), a, b, c, m, n, k, nullptr,
           nullptr);
    const auto expected = example::product(left, right, m, n, k);
    return example::compare(("matmul_kernel " + hash).c_str(), c.to_vector(), expected, 0);
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
