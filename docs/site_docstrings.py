"""What the reference of `make site` reads docstrings with: a section `Example:` holds code, as
`Examples:` does.
"""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Names the section of examples as the parser of docstrings knows it; by another name it would
    be prose.
    """

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
