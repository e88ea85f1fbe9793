"""Lets Triton's interpreter run GPU kernels on the CPU, vLLM's included.

vLLM's CPU build uses Triton only if there is a backend named ``cpu``. The one registered here
answers questions and compiles nothing: with ``TRITON_INTERPRET=1`` kernels run in numpy.
"""

import os

import numpy as np


def install() -> None:
    """Call once, before vLLM is imported."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before Triton is first imported"
    _register_backend()
    _multiply_bfloat16_as_numbers()
    _patch_language_once()
    _leave_tensors_where_they_are()


def _register_backend() -> None:
    from triton import backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            raise NotImplementedError

        def get_current_target(self):
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_benchmarker(self):
            raise NotImplementedError

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=0):
            return 0

    backends.backends["cpu"] = backends.Backend(compiler=BaseBackend, driver=Driver)


def _multiply_bfloat16_as_numbers() -> None:
    """The interpreter keeps bfloat16 as its raw bits and multiplies these: convert first."""
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter.InterpreterBuilder.create_dot

    def as_float(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return stock(self, as_float(a), as_float(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _patch_language_once() -> None:
    """Patch ``triton.language`` once per module, not (10 ms) at every launch."""
    from triton.runtime import interpreter

    stock, done = interpreter._patch_lang, set()

    class Nothing:
        def restore(self):
            pass

    def patch(fn):
        modules = (interpreter.tl, interpreter.tl.core)
        key = frozenset(id(v) for v in fn.__globals__.values() if v in modules)
        if key not in done:
            stock(fn)
            done.add(key)
        return Nothing()

    interpreter._patch_lang = patch


def _leave_tensors_where_they_are() -> None:
    """Everything is on the CPU already: no staging of whole storages around each launch."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda self, *args: None
