/* What the files of torch_cubin._launch share. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Calls a Python function with a vectorcall's arguments. */
PyObject* call_python(PyObject* function, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* names);

/* The module's functions of python_products.c. */
extern PyMethodDef products_methods[];
