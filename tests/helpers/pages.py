"""A written page as tests read it."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Every tag with its attributes, and what stands in scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.stack = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.stack.append(tag)
        if tag in ("script", "style"):
            self.inside.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("script", "style"):
            tag, attributes, text = self.inside.pop()
            self.inside.append((tag, attributes, text + data))

    def handle_endtag(self, tag):
        if tag in self.stack:
            while self.stack.pop() != tag:
                pass

    @property
    def scripts(self):
        """The content of the scripts, in order."""
        return [text for tag, _, text in self.inside if tag == "script"]
