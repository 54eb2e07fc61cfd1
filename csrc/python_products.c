/* Kernels over aten::addmm and its kin, as Python builtins, for install() and drop_in().
 *
 * PyTorch's stable ABI registers no kernel whose schema has a Scalar, before torch 2.16 at least.
 * torch.library.Library.impl() takes any callable: one in C costs some tenths of a microsecond. It
 * reads the tensors, calls the library's torch_cubin_aten_sum without the GIL, and wraps the result.
 * What that leaves to PyTorch goes to a Python function. */
#include <stdint.h>
#include <string.h>

#include "python_calls.h"

enum { kNew, kOut, kInPlace };
enum { kBeta, kAlpha, kOutName, kNames };
enum { kSelf, kA, kB, kOutTensor, kTensors };
enum { kNoMemory = -2 }; /* of torch_cubin_aten_sum */

static struct {
  int (*aten_sum)(int op, int form, void* const* tensors, const double* factors, void** result,
                  const char** text);
  PyObject* (*wrap)(const void* tensor); /* THPVariable_Wrap(const at::TensorBase&) */
  void (*release)(void* tensor);         /* deletes a handle */
  PyObject* out_of_memory;               /* the exception type */
  PyTypeObject* tensor_type;             /* the base of all tensors */
  Py_ssize_t tensor_at;                  /* bytes from a torch.Tensor's address to its at::Tensor */
  PyObject* names[kNames];
} products;

/* 0 for complex numbers, and for integers that no double holds. */
static int read_factor(PyObject* value, double* out) {
  const long long exact = 1LL << 53;
  if (PyFloat_CheckExact(value)) {
    *out = PyFloat_AsDouble(value);
    return 1;
  }
  if (!PyLong_Check(value)) return 0; /* bool is an int */
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  *out = (double)number;
  return overflow == 0 && number >= -exact && number <= exact;
}

static int read_handle(PyObject* value, void** handle) {
  if (!PyType_IsSubtype(Py_TYPE(value), products.tensor_type)) return 0;
  *handle = (char*)value + products.tensor_at;
  return 1;
}

static int read_named(PyObject* const* values, PyObject* names, double* factors, int* readable,
                      PyObject** out) {
  const Py_ssize_t count = names != NULL ? PyTuple_Size(names) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GetItem(names, i);
    int known = 0;
    while (known < kNames && name != products.names[known] &&
           PyUnicode_Compare(name, products.names[known]) != 0) {
      ++known;
    }
    if (known == kNames) return 0;
    if (known == kOutName) {
      *out = values[i];
    } else if (!read_factor(values[i], &factors[known])) {
      *readable = 0;
    }
  }
  return 1;
}

/* `self` is (op, form, the Python function). */
static PyObject* sum(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                     PyObject* names) {
  PyObject* python = PyTuple_GetItem(self, 2);
  const int op = (int)PyLong_AsLong(PyTuple_GetItem(self, 0));
  const int form = (int)PyLong_AsLong(PyTuple_GetItem(self, 1));
  double factors[2] = {1, 1}; /* beta and alpha */
  void* tensors[kTensors] = {NULL};
  void* result = NULL;
  const char* text = NULL;
  PyObject* out = NULL;
  int readable = 1;
  if (count != 3) goto in_python;
  if (!read_named(arguments + count, names, factors, &readable, &out)) goto in_python;
  for (int i = 0; i < 3; ++i) {
    if (!read_handle(arguments[i], &tensors[i])) goto in_python;
  }
  if ((form == kOut) != (out != NULL)) goto in_python;
  if (out != NULL && !read_handle(out, &tensors[kOutTensor])) goto in_python;
  int done;
  Py_BEGIN_ALLOW_THREADS; /* the driver blocks if its queue is full */
  done = products.aten_sum(op, form, tensors, readable ? factors : NULL, &result, &text);
  Py_END_ALLOW_THREADS;
  if (done < 0) {
    PyErr_SetString(done == kNoMemory ? products.out_of_memory : PyExc_RuntimeError, text);
    return NULL;
  }
  if (done == 0) goto in_python;
  if (form == kNew) {
    PyObject* wrapped = products.wrap(result);
    products.release(result);
    return wrapped;
  }
  if (out == NULL) out = arguments[0];
  Py_INCREF(out);
  return out;
in_python:
  return call_python(python, arguments, count, names);
}

static PyMethodDef sum_method = {"sum", (PyCFunction)(void (*)(void))sum,
                                 METH_FASTCALL | METH_KEYWORDS, NULL};

/* sum_kernel(op, form, function): a builtin for Library.impl(). */
static PyObject* sum_kernel(PyObject* module, PyObject* arguments) {
  (void)module;
  if (!PyTuple_Check(arguments) || PyTuple_Size(arguments) != 3) {
    PyErr_SetString(PyExc_TypeError, "expected (op, form, function)");
    return NULL;
  }
  return PyCFunction_NewEx(&sum_method, arguments, NULL);
}

/* configure_products(aten_sum, wrap, release, OutOfMemoryError, TensorBase, tensor_at). */
static PyObject* configure_products(PyObject* module, PyObject* arguments) {
  unsigned long long aten_sum, wrap, release;
  PyObject *out_of_memory, *type;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "KKKOO!n", &aten_sum, &wrap, &release, &out_of_memory,
                        &PyType_Type, &type, &products.tensor_at)) {
    return NULL;
  }
  static const char* const names[kNames] = {"beta", "alpha", "out"};
  for (int i = 0; i < kNames; ++i) {
    products.names[i] = PyUnicode_InternFromString(names[i]);
    if (products.names[i] == NULL) return NULL;
  }
  Py_INCREF(type); /* never released: kernels may be running */
  Py_INCREF(out_of_memory);
  products.out_of_memory = out_of_memory;
  products.tensor_type = (PyTypeObject*)type;
  products.aten_sum =
      (int (*)(int, int, void* const*, const double*, void**, const char**))(uintptr_t)aten_sum;
  products.wrap = (PyObject * (*)(const void*))(uintptr_t)wrap;
  products.release = (void (*)(void*))(uintptr_t)release;
  Py_RETURN_NONE;
}

PyMethodDef products_methods[] = {
    {"sum_kernel", sum_kernel, METH_VARARGS, "A kernel over aten::addmm or its kin."},
    {"configure_products", configure_products, METH_VARARGS, "Brings what they do not link."},
    {NULL, NULL, 0, NULL},
};
