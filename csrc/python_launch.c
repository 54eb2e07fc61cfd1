/* torch_cubin._launch: the fast path for common kernel calls, without Python's cost per argument.
 *
 * A Launcher packs contiguous plain tensors, ints, floats, bools and None, and calls the library's
 * torch_cubin_kernel_launch. All other calls, including wrong ones, are passed unchanged to
 * _launch_plainly() of its Python subclass (_kernels/module.py), which has the rules and the error
 * messages. This file must accept only calls that _launch_plainly() accepts.
 *
 * Uses only Python's limited API of 3.10, so that one binary serves every later Python. Links
 * neither CUDA nor torch: configure() passes the library's functions and the offset of the
 * at::Tensor in a torch.Tensor.
 *
 * Over 500 lines: packing, cache and type of one extension module, all of it static. */
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "python_calls.h"
/* After Python.h. */
#include <structmember.h>

#include "runtime/launch_call.h"

/* NOTE: the flag and both functions joined the limited API in 3.12, unchanged since 3.9. 3.10 and
 * 3.11 have them too; only their headers hide them. */
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
typedef PyObject* (*Vectorcall)(PyObject*, PyObject* const*, size_t, PyObject*);
extern PyObject* PyVectorcall_Call(PyObject* callable, PyObject* tuple, PyObject* dict);

enum { kMaxParams = 64 }; /* kernels with more take _launch_plainly() */
enum { kRecordingKeys = 3 };
enum { kGrid, kBlock, kSharedMemory, kStream, kKeywords };

/* DLTensor of DLPack 1.x, whose ABI is stable. */
struct Exchanged {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};
enum { kExchangedComplex = 5 };

static struct {
  char* (*launch)(void* kernel, const struct torch_cubin_launch_call* call);
  PyObject* tensor_types[2]; /* torch.Tensor and Parameter; no subclasses */
  int (*read_tensor)(const void* tensor, uint64_t takes, int32_t* device, uint64_t* address);
  Py_ssize_t tensor_at; /* bytes from a torch.Tensor's address to its at::Tensor */
  Py_ssize_t keys_at;   /* bytes from an at::TensorImpl's address to its dispatch keys */
  /* The dispatch keys that every GPU tensor has, and those that a plain tensor may have. */
  uint64_t device_keys, plain_keys;
  /* PyTorch's DLPack exchange function, used if the offsets above are unknown; null otherwise. */
  int (*exchange)(void* object, struct Exchanged* out);
  int32_t exchange_device; /* DLPack's number of the supported device type */
  PyObject *is_neg, *is_conj;
  /* c10::impl::tls_is_dispatch_key_included, and the keys under which calls are recorded. */
  bool (*is_included)(uint16_t key);
  uint16_t recording_keys[kRecordingKeys];
  PyObject* raise_error; /* takes an error's address and raises it */
  PyObject *grid, *block, *shared_memory, *stream, *plainly;
} state;

typedef struct {
  uint64_t takes;               /* accepted dtypes, a bit per c10::ScalarType; 0: not stated */
  int64_t least;                /* range of an int, */
  uint64_t most;                /* unless both are 0 */
  uint8_t size;                 /* 1, 2, 4, 8, or 0 for others */
  uint8_t may_point, may_float; /* if the binary distinguishes pointers from numbers */
  uint8_t is_float;             /* stated as float: an int is converted */
} Param;

typedef struct {
  PyObject_HEAD Vectorcall call;
  void* kernel; /* null until bound */
  Py_ssize_t count;
  PyObject* names; /* of the last call, and the keyword of each */
  uint8_t keyword_count, keywords[kKeywords];
  Param params[kMaxParams];
} Launcher;

/* --- the parts of a call; 0 means: Python must handle it (no exception is set) --- */

static int read_int(PyObject* value, long long* out) {
  int overflow = 0;
  if (!PyLong_CheckExact(value)) return 0;
  *out = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

static int read_triple(PyObject* value, int64_t out[3]) {
  long long number;
  out[0] = out[1] = out[2] = 1;
  if (PyLong_CheckExact(value)) {
    if (!read_int(value, &number)) return 0;
    out[0] = number;
    return 1;
  }
  if (!PyTuple_CheckExact(value)) return 0;
  const Py_ssize_t size = PyTuple_Size(value);
  if (size < 1 || size > 3) return 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!read_int(PyTuple_GetItem(value, i), &number)) return 0;
    out[i] = number;
  }
  return 1;
}

static int answers_no(PyObject* object, PyObject* question) {
  PyObject* answer = PyObject_CallMethodObjArgs(object, question, NULL);
  const int no = answer == Py_False;
  if (answer == NULL) PyErr_Clear();
  Py_XDECREF(answer);
  return no;
}

/* Whether `takes`, a bit per c10::ScalarType, has the tensor's dtype. The table's rows are DLPack's
 * codes: int, uint, float, opaque, bfloat, complex, bool. Types of fewer than 8 bits, and 8-bit
 * types that are not integers, are left to Python. */
static int is_taken(const struct Exchanged* found, uint64_t takes) {
  static const int8_t numbers[7][4] = {/* of 8, 16, 32 and 64 bits */
                                       {1, 2, 3, 4},     {0, 27, 28, 29},  {-1, 5, 6, 7},
                                       {-1, -1, -1, -1}, {-1, 15, -1, -1}, {-1, -1, 8, 9},
                                       {11, -1, -1, -1}};
  int column = 0;
  while (column < 4 && found->dtype_bits != 8 << column) ++column;
  if (found->dtype_code > 6 || column == 4 || found->dtype_lanes != 1) return 0;
  const int number = numbers[found->dtype_code][column];
  return number >= 0 && (takes >> number & 1) != 0;
}

/* Reads a tensor through DLPack, which takes some hundred nanoseconds longer. DLPack ignores lazy
 * negation and conjugation, so they are checked separately. */
static int read_exchanged(PyObject* object, uint64_t takes, int32_t* device, uint64_t* out) {
  struct Exchanged found;
  uint64_t step = 1; /* may exceed 2^63 after the last dim */
  int empty = 0, dense = 1;
  memset(&found, 0, sizeof(found));
  if (state.exchange(object, &found) != 0) {
    PyErr_Clear(); /* wrapped, sparse, another device: Python reports it */
    return 0;
  }
  if (takes != 0 && !is_taken(&found, takes)) return 0;
  if (found.device_type != state.exchange_device || !answers_no(object, state.is_neg)) return 0;
  if (found.dtype_code == kExchangedComplex && !answers_no(object, state.is_conj)) return 0;
  for (int32_t i = found.ndim; i-- > 0;) {
    empty |= found.shape[i] == 0;
    dense &= found.shape[i] == 1 || (found.strides != NULL && (uint64_t)found.strides[i] == step);
    step *= (uint64_t)found.shape[i];
  }
  if (!dense && !empty) return 0;
  *out = (uint64_t)(uintptr_t)found.data + found.byte_offset;
  if (*out < (uint64_t)1 << 40) return 0; /* possibly an offset from a null pointer */
  if (*device >= 0 && *device != found.device_id) return 0;
  *device = found.device_id;
  return 1;
}

static int read_tensor(PyObject* object, uint64_t takes, int32_t* device, uint64_t* out) {
  if (state.exchange != NULL) return read_exchanged(object, takes, device, out);
  int32_t found;
  const char* tensor = (const char*)object + state.tensor_at;
  const char* implementation;
  uint64_t keys;
  memcpy(&implementation, tensor, sizeof(implementation));
  memcpy(&keys, implementation + state.keys_at, sizeof(keys));
  /* Lazily negated, wrapped, sparse. For some, PyTorch 2.11 would print a trace to stderr. */
  if ((keys & state.device_keys) != state.device_keys || (keys & ~state.plain_keys) != 0) return 0;
  if (!state.read_tensor(tensor, takes, &found, out)) return 0;
  if (*device >= 0 && *device != found) return 0;
  *device = found;
  return 1;
}

/* Assumes a little-endian machine. */
static int pack_number(const Param* param, double number, uint64_t* out);

static int pack_int(const Param* param, PyObject* value, uint64_t* out) {
  long long number;
  if (!read_int(value, &number)) return 0;
  if (param->is_float) return pack_number(param, (double)number, out);
  if (param->most != 0 && (number < param->least || (number > 0 && (uint64_t)number > param->most)))
    return 0;
  switch (param->size) {
    case 8:
      break;
    case 4:
      if (number < INT32_MIN || number > (long long)UINT32_MAX) return 0;
      break;
    case 2:
      if (number < INT16_MIN || number > UINT16_MAX) return 0;
      break;
    case 1:
      if (number < INT8_MIN || number > UINT8_MAX) return 0;
      break;
    default:
      return 0;
  }
  *out = (uint64_t)number;
  return 1;
}

static int pack_number(const Param* param, double number, uint64_t* out) {
  if (!param->may_float) return 0;
  if (param->size == 8) {
    memcpy(out, &number, 8);
    return 1;
  }
  /* Near float32's limit, Python decides whether rounding overflows. */
  if (param->size != 4 || (number - number == 0 && (number > 3.4e38 || number < -3.4e38))) return 0;
  const float rounded = (float)number;
  memcpy(out, &rounded, 4);
  return 1;
}

static int pack(const Param* param, PyObject* argument, int32_t* device, uint64_t* out) {
  PyObject* type = (PyObject*)Py_TYPE(argument);
  if (type == state.tensor_types[0] || type == state.tensor_types[1]) {
    return param->size == 8 && param->may_point && read_tensor(argument, param->takes, device, out);
  }
  if (PyLong_CheckExact(argument)) return pack_int(param, argument, out);
  if (PyFloat_CheckExact(argument)) return pack_number(param, PyFloat_AsDouble(argument), out);
  *out = argument == Py_True;
  if (argument == Py_True || argument == Py_False) {
    return param->size != 0 && !param->is_float && param->least <= 0;
  }
  return argument == Py_None && param->size == 8 && param->may_point;
}

/* Maps each name of the tuple to its keyword, and caches the tuple: a call site passes the same one
 * every time, and comparing the names is expensive. Only exact str names are accepted, so that
 * freeing the tuple runs no user code and no reference cycle can form. */
static int learn_names(Launcher* self, PyObject* names) {
  PyObject* const known[kKeywords] = {state.grid, state.block, state.shared_memory, state.stream};
  const Py_ssize_t count = PyTuple_Size(names);
  uint8_t keywords[kKeywords] = {0};
  if (count > kKeywords) return 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GetItem(names, i);
    int keyword = 0;
    if (!PyUnicode_CheckExact(name)) return 0;
    while (keyword < kKeywords && name != known[keyword] &&
           PyUnicode_Compare(name, known[keyword]) != 0) {
      ++keyword;
    }
    if (keyword == kKeywords) return 0;
    keywords[i] = (uint8_t)keyword;
  }
  memcpy(self->keywords, keywords, sizeof(keywords));
  self->keyword_count = (uint8_t)count;
  Py_INCREF(names);
  Py_XDECREF(self->names);
  self->names = names;
  return 1;
}

static int read_keywords(Launcher* self, PyObject* const* values, PyObject* names,
                         struct torch_cubin_launch_call* call) {
  int given = 0;
  if (names == NULL) return 0;
  if (names != self->names && !learn_names(self, names)) return 0;
  for (int i = 0; i < self->keyword_count; ++i) {
    given |= 1 << self->keywords[i];
    switch (self->keywords[i]) {
      case kGrid:
        if (!read_triple(values[i], call->grid)) return 0;
        break;
      case kBlock:
        if (!read_triple(values[i], call->block)) return 0;
        break;
      case kSharedMemory: {
        long long number;
        if (!read_int(values[i], &number)) return 0;
        call->shared_memory = number;
        break;
      }
      default:
        if (values[i] != Py_None) return 0;
    }
  }
  return (given & (1 << kGrid)) && (given & (1 << kBlock));
}

PyObject* call_python(PyObject* function, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* names) {
  const Py_ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
  PyObject* result = NULL;
  PyObject* tuple = PyTuple_New(count);
  PyObject* dict = PyDict_New();
  if (tuple == NULL || dict == NULL) goto done;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(arguments[i]);
    PyTuple_SetItem(tuple, i, arguments[i]);
  }
  for (Py_ssize_t i = 0; i < named; ++i) {
    if (PyDict_SetItem(dict, PyTuple_GetItem(names, i), arguments[count + i]) != 0) goto done;
  }
  result = PyObject_Call(function, tuple, dict);
done:
  Py_XDECREF(dict);
  Py_XDECREF(tuple);
  return result;
}

static PyObject* call_plainly(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                              PyObject* names) {
  PyObject* method = PyObject_GetAttr(self, state.plainly);
  if (method == NULL) return NULL;
  PyObject* result = call_python(method, arguments, count, names);
  Py_DECREF(method);
  return result;
}

/* Whether a trace or a mode of PyTorch may be recording calls; Python then handles the call. */
static int may_be_recorded(void) {
  for (int i = 0; i < kRecordingKeys; ++i) {
    if (state.is_included(state.recording_keys[i])) return 1;
  }
  return 0;
}

static PyObject* launcher_call(PyObject* object, PyObject* const* arguments, size_t flagged,
                               PyObject* names) {
  Launcher* self = (Launcher*)object;
  const Py_ssize_t count = (Py_ssize_t)(flagged & ~ARGUMENTS_OFFSET);
  struct torch_cubin_launch_call call;
  uint64_t values[kMaxParams];
  void* params[kMaxParams];
  memset(&call, 0, sizeof(call));
  call.size = sizeof(call);
  call.device = -1;
  if (self->kernel == NULL || count != self->count || may_be_recorded()) goto plainly;
  if (!read_keywords(self, arguments + count, names, &call)) goto plainly;
  for (Py_ssize_t i = 0; i < count; ++i) {
    params[i] = &values[i];
    if (!pack(&self->params[i], arguments[i], &call.device, &values[i])) goto plainly;
  }
  if (call.device < 0) goto plainly;
  call.params = params;
  char* error;
  /* The driver blocks if its queue is full. */
  Py_BEGIN_ALLOW_THREADS;
  error = state.launch(self->kernel, &call);
  Py_END_ALLOW_THREADS;
  if (error != NULL) {
    PyObject* raised =
        PyObject_CallFunction(state.raise_error, "K", (unsigned long long)(uintptr_t)error);
    if (raised == NULL) return NULL;
    Py_DECREF(raised);
  }
  Py_RETURN_NONE;
plainly:
  return call_plainly(object, arguments, count, names);
}

/* --- the type --- */

static PyObject* launcher_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  (void)arguments;
  (void)keywords;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Launcher* self = (Launcher*)allocate(type, 0);
  if (self == NULL) return NULL;
  self->call = launcher_call;
  self->kernel = NULL;
  self->count = 0;
  self->names = NULL;
  return (PyObject*)self;
}

static void launcher_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(((Launcher*)self)->names);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

/* _bind(handle, ((size, kind, takes, number), ...)): sizes and kinds of the parameters from the
 * binary, dtypes and number kinds from their stated types. */
static PyObject* launcher_bind(PyObject* object, PyObject* arguments) {
  Launcher* self = (Launcher*)object;
  unsigned long long handle;
  PyObject* params;
  if (!PyArg_ParseTuple(arguments, "KO!", &handle, &PyTuple_Type, &params)) return NULL;
  const Py_ssize_t count = PyTuple_Size(params);
  if (count > kMaxParams) Py_RETURN_NONE; /* stays unbound */
  for (Py_ssize_t i = 0; i < count; ++i) {
    unsigned int size;
    unsigned long long takes;
    const char *kind, *number;
    if (!PyArg_ParseTuple(PyTuple_GetItem(params, i), "IsKs", &size, &kind, &takes, &number)) {
      return NULL;
    }
    self->params[i].size = size == 1 || size == 2 || size == 4 || size == 8 ? (uint8_t)size : 0;
    self->params[i].may_point = strcmp(kind, "value") != 0;
    self->params[i].is_float = strcmp(number, "float") == 0;
    self->params[i].may_float =
        strcmp(kind, "pointer") != 0 && (!*number || self->params[i].is_float);
    self->params[i].takes = takes;
    self->params[i].least = 0;
    self->params[i].most = 0;
    if (size >= 1 && size <= 8) {
      if (strcmp(number, "signed") == 0) {
        self->params[i].most = ((uint64_t)1 << (8 * size - 1)) - 1;
        self->params[i].least = -(int64_t)self->params[i].most - 1;
      } else if (strcmp(number, "unsigned") == 0) {
        self->params[i].most = ~(uint64_t)0 >> (64 - 8 * size);
      } else if (strcmp(number, "bool") == 0) {
        self->params[i].most = 1;
      } else if (strcmp(number, "none") == 0) { /* Python refuses ints and bools */
        self->params[i].least = INT64_MAX;
        self->params[i].most = 1;
      }
    }
  }
  self->count = count;
  self->kernel = (void*)(uintptr_t)handle;
  Py_RETURN_NONE;
}

static PyMethodDef launcher_methods[] = {
    {"_bind", launcher_bind, METH_VARARGS, "Takes a kernel's handle and parameters."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "Launches a kernel; the base class of torch_cubin.Kernel."},
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, launcher_methods},
    {Py_tp_members, launcher_members},
    {0, NULL},
};
static PyType_Spec launcher_spec = {
    "torch_cubin._launch.Launcher", sizeof(Launcher), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL, launcher_slots};

/* --- the module --- */

/* configure(launch, (Tensor, Parameter), read_tensor, tensor_at, keys_at, device_keys, plain_keys,
 *           raise_error) */
static PyObject* configure(PyObject* module, PyObject* arguments) {
  unsigned long long launch, read, device_keys, plain_keys;
  Py_ssize_t tensor_at, keys_at;
  PyObject *types[2], *raise_error;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "K(OO)KnnKKO", &launch, &types[0], &types[1], &read, &tensor_at,
                        &keys_at, &device_keys, &plain_keys, &raise_error)) {
    return NULL;
  }
  /* Never released: calls may be running. */
  for (int i = 0; i < 2; ++i) {
    Py_INCREF(types[i]);
    state.tensor_types[i] = types[i];
  }
  Py_INCREF(raise_error);
  state.raise_error = raise_error;
  state.launch = (char* (*)(void*, const struct torch_cubin_launch_call*))(uintptr_t)launch;
  state.read_tensor = (int (*)(const void*, uint64_t, int32_t*, uint64_t*))(uintptr_t)read;
  state.tensor_at = tensor_at;
  state.keys_at = keys_at;
  state.device_keys = device_keys;
  state.plain_keys = plain_keys;
  Py_RETURN_NONE;
}

/* recording(function, three keys): sets is_included and recording_keys. */
static PyObject* set_recording(PyObject* module, PyObject* arguments) {
  unsigned long long function;
  unsigned short* const keys = state.recording_keys;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "KHHH", &function, &keys[0], &keys[1], &keys[2])) return NULL;
  state.is_included = (bool (*)(uint16_t))(uintptr_t)function;
  Py_RETURN_NONE;
}

/* exchange(function, device type): reads tensors through DLPack; function 0 disables it. */
static PyObject* set_exchange(PyObject* module, PyObject* arguments) {
  unsigned long long function;
  int device;
  (void)module;
  if (!PyArg_ParseTuple(arguments, "Ki", &function, &device)) return NULL;
  state.exchange = (int (*)(void*, struct Exchanged*))(uintptr_t)function;
  state.exchange_device = device;
  Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"recording", set_recording, METH_VARARGS, "Brings how to ask whether calls are recorded."},
    {"exchange", set_exchange, METH_VARARGS, "Reads tensors by DLPack's exchange function."},
    {"configure", configure, METH_VARARGS, "Brings what the extension does not link."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                               "torch_cubin._launch",
                                               "Kernel calls without Python's cost.",
                                               -1,
                                               module_methods,
                                               NULL,
                                               NULL,
                                               NULL,
                                               NULL};

PyMODINIT_FUNC PyInit__launch(void) {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == NULL) return NULL;
  state.grid = PyUnicode_InternFromString("grid");
  state.block = PyUnicode_InternFromString("block");
  state.shared_memory = PyUnicode_InternFromString("shared_memory");
  state.stream = PyUnicode_InternFromString("stream");
  state.is_neg = PyUnicode_InternFromString("is_neg");
  state.is_conj = PyUnicode_InternFromString("is_conj");
  state.plainly = PyUnicode_InternFromString("_launch_plainly");
  PyObject* type = PyType_FromSpec(&launcher_spec);
  if (type == NULL || PyModule_AddFunctions(module, products_methods) != 0 ||
      PyModule_AddObject(module, "Launcher", type) != 0) {
    Py_XDECREF(type);
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
