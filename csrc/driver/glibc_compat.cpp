// Keeps the library loadable on systems older than the one that builds it: glibc 2.28 and the
// libstdc++ of GCC 8, which is what PyTorch's own wheels need. dl.cpp does the same for dlopen.
//
// Each definition here stands in for a symbol that newer headers refer to and that older libraries
// lack. They are local to _C.so (csrc/exports.map). tests/unit/test_abi.py reads what the library
// needs, and fails if a new one creeps in.

#include <new>

#if defined(__GLIBC__)
extern "C" {
// glibc 2.32: true while the process has one thread. std::shared_ptr of GCC >= 11 reads it to skip
// atomic counting; 0 means "count atomically", which is always right.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
#endif

#if defined(__GLIBCXX__)
namespace std {
// GLIBCXX_3.4.29: called by std::allocator and `new T[n]` of GCC >= 11 if n is too large.
void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
