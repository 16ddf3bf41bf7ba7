"""Converts files of packages to plain text: HTML, manual pages, POD, dictionaries of dictd, marked-up text and source code."""

import gzip
import html
import re

# Dictionary entries are short: neighbours are joined until a document has this many characters.
DOCUMENT = 4000

CODE = {
    "code-c": (".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh"),
    "code-python": (".py", ".pyx"),
    "code-rust": (".rs",),
    "code-other": (".go", ".java", ".js", ".ts", ".pl", ".pm", ".sh", ".rb", ".tcl", ".sql", ".hs", ".ml", ".el", ".erl", ".lua"),
}
SOURCE_OF = {suffix: source for source, suffixes in CODE.items() for suffix in suffixes}

# Pages without sentences: indexes, lists of members, searches, listings, changelogs.
LISTS = re.compile(
    r"(?i)genindex|modindex|search|[-_]members|_source\.|hierarchy|allclasses|package-tree|package-use|class-use|overview-tree|/index-\d|/doc-index"
    r"|functions?_|globals|namespacemembers|changelog|copyright|/_sources/|/_static/|/_modules/|/src/.*\.html$|whatsnew/\d|news\.|licen[cs]e|authors|attribution|aarm-legal"
)

GENERATED = re.compile(r"(?i)@generated|do not (edit|modify)|auto(matically)?[- ]?generated|generated (by|from|automatically)|this file was generated|machine generated")
ENCODED = re.compile(r"[A-Za-z0-9+/=]{160,}|(?:\\x[0-9a-fA-F]{2}){24,}|(?:0x[0-9a-fA-F]+[,\s]+){40,}")
LICENCE = re.compile(r"(?i)copyright|licen[cs]e|spdx|warranty")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\x80-\x9f\ufffe\uffff\ufffd]")

COMMENT = re.compile(r"(?s)<!--.*?-->|<(script|style|svg|math|head|select|form|button)\b.*?</\1\s*>|<[!?][^>]*>", re.I)
TAG = re.compile(r"(<(?:[a-zA-Z/])(?:[^>\"']|\"[^\"]*\"|'[^']*')*>)")
NAME = re.compile(r"</?([a-zA-Z0-9]+)")
SIDE = re.compile(
    r"(?i)(?:class|id|role|rel)\s*=\s*[\"']?[^\"'>]*(?:sidebar|navigat|navbar|navheader|navfooter|\bnav\b|breadcrumb|headerlink|related|footer|\btoc\b"
    r"|contents?-?(?:table|list)|table-?of-?contents|tocset|\bmenu|skip|search|linenos?\b|sub-title|top-nav|bottom-nav|anchor\b|srclink|copyright)"
)
BLOCKS = set("p div section article h1 h2 h3 h4 h5 h6 ul ol dl table blockquote pre center main body hr address figure tr dt dd li br details summary".split())
PARAGRAPHS = set("p h1 h2 h3 h4 h5 h6 ul ol dl table blockquote pre section dt".split())
EMPTY = set("br hr img input meta link area base col embed param source track wbr p li dt dd tr td th option".split())


def page(data):
    """The text of an HTML page without its navigation: a paragraph per line, a blank line between paragraphs, and `<pre>` as it is."""
    data = COMMENT.sub(" ", data)
    out, skipped, depth, pre = [], None, 0, 0
    for piece in TAG.split(data):
        if not piece:
            continue
        if piece[0] == "<" and (match := NAME.match(piece)):
            name, closing = match[1].lower(), piece[1] == "/"
            if skipped:
                if name == skipped and not piece.endswith("/>"):
                    depth += -1 if closing else 1
                    skipped = skipped if depth else None
                continue
            if not closing and (name in ("nav", "header", "footer", "aside", "title") or (name not in EMPTY and SIDE.search(piece))):
                if name not in ("body", "html", "main", "article") and not piece.endswith("/>"):
                    skipped, depth = name, 1
                    continue
            if name == "pre":
                pre = max(0, pre + (-1 if closing else 1))
            if name in BLOCKS:
                out.append("\n\n" if name in PARAGRAPHS else "\n")
                if name == "li" and not closing:
                    out.append("- ")
            elif name in ("td", "th"):
                out.append("  ")
        elif not skipped:
            text = html.unescape(piece) if "&" in piece else piece
            out.append(text if pre else re.sub(r"\s+", " ", text))
    lines = "".join(out).replace("\xa0", " ").replace("¶", "").replace("\r", "").split("\n")
    lines = [line.rstrip() if line.startswith("  ") else line.strip() for line in lines]
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)^-\n+", "- ", "\n".join(lines))).strip()


ROFF_CHARACTERS = {"(aq": "'", "(dq": '"', "(bu": "-", "(co": "©", "(em": "-", "(en": "-", "(lq": '"', "(rq": '"', "(ha": "^", "(ti": "~", "(rs": "\\", "(mi": "-", "(pl": "+"}


def roff(text):
    """The text of a manual page of the macros `man` or `mdoc`: headings, filled paragraphs and literal lines."""

    def plain(line):
        line = re.sub(r"\\(f[BIRP1-4]|f\([A-Z]{2}|f\[[^\]]*\]|s[+-]?\d|&|/|,|\||\^|%|c|:)", "", line)
        line = re.sub(r"\\(\(..|\*\(..)", lambda m: ROFF_CHARACTERS.get(m[1], ""), line)
        return line.replace("\\-", "-").replace("\\ ", " ").replace("\\e", "\\").replace("\\'", "'").replace("\\`", "`").replace("\\~", " ").replace("\\(", "(")

    out, literal = [], False
    for line in text.split("\n"):
        if line.startswith((".\\\"", "'\\\"", "'", ".de", "..")):
            continue
        if not line.startswith("."):
            out.append(plain(line) + ("\n" if literal else " "))
            continue
        macro, _, rest = line[1:].strip().partition(" ")
        words = [plain(a or b) for a, b in re.findall(r'"((?:[^"]|"")*)"|(\S+)', rest)]
        if macro in ("SH", "SS", "Sh", "Ss"):
            out.append("\n\n" + " ".join(words).replace('""', '"') + "\n\n")
        elif macro in ("PP", "P", "LP", "TP", "TQ", "Pp", "RS", "RE", "sp", "IP", "It", "HP"):
            out.append("\n" if literal else "\n\n")
            if macro in ("IP", "It") and words:
                out.append("- " if words[0] in ("-", "*") else " ".join(w for w in words if not (macro == "It" and len(w) == 2 and w[0].isupper())) + "\n")
        elif macro in ("nf", "EX", "Bd"):
            literal = True
            out.append("\n\n")
        elif macro in ("fi", "EE", "Ed"):
            literal = False
            out.append("\n\n")
        elif macro in ("BR", "RB", "IR", "RI", "BI", "IB"):
            out.append("".join(words) + ("\n" if literal else " "))
        elif macro in ("B", "I", "SM", "SB", "R") or (len(macro) == 2 and macro[0].isupper() and macro[1].islower() and macro not in ("Dd", "Dt", "Os", "Bl", "El")):
            out.append(" ".join(words) + ("\n" if literal else " "))
    lines = [line.rstrip() for line in "".join(out).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def pod(text):
    """The text of Perl's documentation."""
    for _ in range(3):
        text = re.sub(r"\b[BCFIL]<(?!<)([^<>|]*)(?:\|[^<>]*)?>", r"\1", text)
        text = re.sub(r"\b[BCFIL]<<+ (.*?) >>+", r"\1", text)
    text = re.sub(r"\b[SXZ]<([^<>]*)>", "", text).replace("E<lt>", "<").replace("E<gt>", ">")
    text = re.sub(r"(?m)^=(?:head\d|item)[ \t]+", "", text)
    return re.sub(r"(?m)^=\w+.*\n?", "", text)


def joined(parts):
    """Neighbouring texts as documents of about DOCUMENT characters."""
    document, length = [], 0
    for part in filter(None, (part.strip() for part in parts)):
        document.append(part)
        length += len(part)
        if length >= DOCUMENT:
            yield "\n\n".join(document)
            document, length = [], 0
    if document:
        yield "\n\n".join(document)


# Where a definition of GCIDE comes from ("[1913 Webster]", "[WordNet 1.5 +PJC]"), and how a headword is spoken ("\Coak\ (k[=o]k)").
ORIGIN = re.compile(r"\s*\[[^\[\]]*(?:1913|WordNet|PJC)[^\[\]]*\]")
SPOKEN = re.compile(r"\s*\\[^\\]{1,80}\\(?:\s*\([^()]*\))?")


def dictionary(text):
    """Entries of a dictionary of dictd: an entry begins at the left margin, and its lines are joined to paragraphs."""
    text = ORIGIN.sub("", SPOKEN.sub("", text)).replace("{", "").replace("}", "")
    for entry in re.split(r"\n(?=\S)", text):
        if not entry.startswith("00-"):
            yield "\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", entry))


SIGNS = re.compile(r"([^\w\s]|_)\1{4,}")


def tidied(text):
    """A technical text without long runs of blanks and signs."""
    lines = []
    for line in text.expandtabs(8).split("\n"):
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        lines.append(" " * (indent if words else 0) + SIGNS.sub(lambda m: m[1] * 4, re.sub(r"(?<=\S) {3,}", "  ", words)))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def source(text):
    """Source code as it is, without first comments that hold a licence; None for generated, encoded and minified files."""
    lines = text.split("\n")
    if len(lines) < 12 or len(text) > 400_000 or len(text) > 60 * len(lines) or max(map(len, lines)) > 400:
        return None
    if GENERATED.search(text[:1500]) or ENCODED.search(text):
        return None
    if sum(map(text.count, "0123456789")) > 0.12 * len(text):
        return None
    lead = re.match(r"(?:#!.*\n)?(?:\s*/\*(?:(?!\*/)[\s\S])*\*/)+\s*", text)
    if lead and LICENCE.search(lead[0]):
        text = text[lead.end() :]
    lead = re.match(r"(?:[ \t]*(?://|#(?!include|if|define|!\[|\[)|--).*\n|[ \t]*\n)+", text)
    if lead and LICENCE.search(lead[0]):
        text = text[lead.end() :]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip("\n")


COMMON = re.compile(r"\b(?:the|of|to|and|a|is|in|for|that|be|this|with|it)\b")


def sentences(text):
    """Whether a text is mostly English sentences or explained listings, and not a list of links or a table of numbers."""
    if len(text) < 300 or len(COMMON.findall(text)) * 100 < len(text):
        return False
    letters = sum(map(str.isalpha, text[:20_000])) + text[:20_000].count(" ")
    long = sum(len(line) for line in text.split("\n") if len(line) >= 45)
    return letters >= 0.7 * min(len(text), 20_000) and long >= 0.4 * len(text) and not ENCODED.search(text)


def convert(path, data, kind):
    """Returns `(source, texts)` for a file of a package, whose texts that are no code are of `kind`; None for a file without a use."""
    name = path
    if name.endswith((".gz", ".dz")):
        data, name = gzip.decompress(data), name[:-3]
    suffix = "." + name.rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""
    code = SOURCE_OF.get(suffix)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        # Pages of older tools are in Latin 1, and a dictionary may have a few stray bytes. Source code in another encoding is left out.
        if code:
            return None
        text = data.decode("utf-8", "ignore") if suffix in (".dict", ".txt") else data.decode("latin-1")
    text = CONTROL.sub("", text.replace("\r\n", "\n").replace("\f", "\n").removeprefix("\ufeff"))
    if code:
        text = source(text)
        return (code, [text]) if text and len(text) >= 400 else None
    if suffix == ".dict":
        return kind, list(joined(dictionary(text)))
    if LISTS.search("/" + name):
        return None
    if suffix in (".html", ".htm", ".xhtml", ".xml"):
        text = page(text)
    elif re.fullmatch(r"\.[1-8]\w{0,4}", suffix) and "/man" in name:
        text = roff(text)
    elif suffix in (".pod",):
        text = pod(text)
    elif suffix not in (".txt", ".rst", ".md", ".text", ".page"):
        return None
    text = tidied(text)
    return (kind, [text]) if sentences(text) else None
