"""What is computed: cases, references, preprocessing, work counts and compilation.

The version stands here because a Hugging Face package is called ``kernels`` too, and ``transformers``
asks whatever it imports under that name for ``__version__``.
"""

__version__ = "0.1.0"
