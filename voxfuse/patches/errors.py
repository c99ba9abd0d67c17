"""What the patch engine raises and warns of."""


class PatchError(RuntimeError):
    """A fusion that was asked for cannot be applied (``strict``), or a patch cannot be lifted; nothing was changed."""


class PatchWarning(UserWarning):
    """Something that the caller should know about the patches, and what to do."""
