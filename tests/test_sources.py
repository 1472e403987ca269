"""sources.py: what is Project Gutenberg's cut out, real books read, and downloads that go wrong."""

import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import sources
from sources import Book, Unavailable, decode, fetch, read_text, strip_gutenberg

STORY = "".join(f"Line {i} of a tale about a fox, a well and a lantern.\n" for i in range(300))

# ------------------------------------------------------------------------------- Gutenberg

HEADER = (
    "The Project Gutenberg EBook of Tales, by Nobody\n\nThis eBook is for the use of anyone\n\n"
)
START = "*** START OF THIS PROJECT GUTENBERG EBOOK TALES ***\n"
CLOSING = "End of Project Gutenberg's Tales, by\nNobody\n"
END = "*** END OF THIS PROJECT GUTENBERG EBOOK TALES ***\n"
TERMS = "Updated editions will replace it.\n\nProject Gutenberg's terms\nare these.\n\n\n" * 9
FULL = "*** START: FULL LICENSE ***\n\nTHE FULL PROJECT GUTENBERG LICENSE\nPLEASE READ IT\n" + TERMS
BOOK = "TALES\n\n  Once there was a fox.\n\nProduced by hand, it ended.\n"


def strip(text):
    """What strip_gutenberg makes of it, as str."""
    parts, cut = strip_gutenberg(text.encode())
    return [part.decode() for part in parts], cut


@pytest.mark.parametrize(
    "text",
    [
        HEADER + START + BOOK + CLOSING + END + FULL,
        HEADER + START + "\n\nProduced by A. B. and\nthe others\n\n\n" + BOOK + "\n\n" + CLOSING,
        HEADER + START + "E-text prepared by A. B.\n\n" + BOOK + END,
        HEADER + START + "This etext was prepared by A. B.\n\n" + BOOK + "\n" + END + FULL,
        HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK TALES ***\n" + BOOK
        + "*** END OF THE PROJECT GUTENBERG EBOOK TALES ***\n" + TERMS,
        HEADER + "***START OF THE PROJECT GUTENBERG EBOOK TALES***\n\n" + BOOK
        + "***END OF THE PROJECT GUTENBERG EBOOK TALES***\n" + FULL,
        HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK TALES\nOF OLD ***\n" + BOOK + END,
        HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK TALES\n\n" + BOOK + END,
        HEADER + "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n" + BOOK
        + "\n\nEnd of The Project Gutenberg Etext of Tales, by Nobody\n",
        "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this here?\n"
        "*END THE SMALL PRINT! FOR PUBLIC DOMAIN E-BOOKS*Ver.02.11.02*END*\n" + BOOK
        + "The End of the Project Gutenberg Etext of Tales",
        START + BOOK,
        HEADER + START + BOOK,
        BOOK + CLOSING,
        BOOK + END + FULL,
        BOOK + END + TERMS,
        BOOK + CLOSING + END + TERMS + FULL,
        BOOK + FULL,
        BOOK + CLOSING + FULL,
        BOOK + CLOSING + "\nThis file should be named tales.txt\n\n" + END,
        BOOK + "THE FULL PROJECT GUTENBERG™ LICENSE\n" + TERMS,
        BOOK + "\n\n" + CLOSING.strip(),
    ],
)  # fmt: skip
def test_what_is_gutenbergs_is_cut_in_every_form(text):
    """Old and new markers, headers without footers and the reverse, a licence after the end."""
    parts, cut = strip(text)
    assert parts == [BOOK]
    assert cut


def test_text_without_markers_is_untouched():
    for text in ("\n\n" + BOOK + "\n\n\n", BOOK + "The End of the tale of Gutenberg\n\n", ""):
        assert strip(text) == ([text], [])


def test_credits_are_cut_only_behind_a_header():
    assert strip("Prepared by a cook.\n" + CLOSING)[0] == ["Prepared by a cook.\n"]


def test_several_books_in_one_file_are_all_kept():
    """Cutting from the first footer to the end lost 49 of 50 books that were joined in one file."""
    whole = HEADER + START + BOOK + CLOSING + END + FULL
    assert strip(whole * 3)[0] == [BOOK] * 3
    assert strip((BOOK + CLOSING + "\n\n") * 3)[0] == [BOOK] * 3
    assert strip(BOOK + CLOSING + whole + whole)[0] == [BOOK] * 3


def test_what_was_cut_is_counted():
    header = HEADER + START
    _, cut = strip(header + BOOK + CLOSING + END + FULL)
    assert cut == [
        f"{len(header)} characters of header",
        f"{len(CLOSING)} characters of closing",
        f"{len(END + FULL)} characters of licence",
    ]


@pytest.mark.parametrize(
    "name, characters, distinct, first, last",
    [
        ("pg2591_grimm.txt", 520738, 78, "FAIRY TALES\n\nBy The Brothers Grimm", "ever\nsince.\n"),
        ("pg27200_andersen.txt", 1996066, 79, "FAIRY TALES OF HANS CHRISTIAN", 'be all wrong."\n'),
        ("pg1597_andersen.txt", 299318, 79, "ANDERSEN'S FAIRY TALES\n\nBy", "the RED SHOES.\n"),
        ("de_grimm_bom_crlf.txt", 420729, 88, "\n                      ", "Wilhelm Carl Grimm]\n"),
        ("zh_tang_poems.txt", 942681, 5387, "寒随穷律变", "旧话成重省。"),
        ("tinyshakespeare.txt", 1115394, 65, "First Citizen:\nBefore", "Whiles thou art waking.\n"),
    ],
)
def test_real_texts(texts, name, characters, distinct, first, last):
    text = read_text(texts / name, "utf-8")[0].decode()
    assert (len(text), len(set(text))) == (characters, distinct)
    assert text.startswith(first)
    assert text.endswith(last)
    assert not re.search("gutenberg|\ufeff|\r", text, re.IGNORECASE)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "gbk"])
def test_blocks_may_end_anywhere(monkeypatch, encoding):
    """Within a character, or between the two of a Windows line end."""
    text = "\n春眠不觉晓,\r\n\r\nab\r\r\nc\r"
    for block in range(4, 40):
        monkeypatch.setattr(sources, "BLOCK", block)
        marked = "\ufeff" * encoding.startswith("utf") + text
        found = decode(marked.encode(encoding), encoding).decode()
        assert found == text.replace("\r\n", "\n").replace("\r", "\n")
        with pytest.raises(ValueError, match=rf"byte {block} \(80\) is not ascii"):
            decode(b"a" * block + b"\x80", "ascii")


# ------------------------------------------------------------------------------- downloads

PAGE = STORY.encode()


class Answers(BaseHTTPRequestHandler):
    """Answers a request with what the server has under that path: a body, a code or a habit."""

    def do_GET(self):
        self.server.asked.append(self.path)
        answer = self.server.answers[self.path]
        if callable(answer):
            answer(self)
        elif isinstance(answer, int):
            self.send_error(answer)
        else:
            send(self, answer)

    def log_message(self, *args):
        pass


def send(handler, body: bytes, length: int | None = None) -> None:
    """Sends a body, announced to be of some length; -1 announces none."""
    handler.send_response(200)
    if length != -1:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    """A server on this machine that has the two addresses of a book; tries follow at once."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(sources, "PAUSES", (0, 0.001, 0.002))
    monkeypatch.setattr(sources, "TIMEOUT", 0.1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.answers, server.asked, server.closing = {}, [], threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        place = f"http://127.0.0.1:{server.server_port}"
        addresses = (f"{place}/first", f"{place}/second")
        server.book = Book("fox.txt", "The Fox", len(STORY), "a tale about a fox", addresses)
        yield server
        server.closing.set()
        server.shutdown()


def test_book_is_fetched_cleaned_and_kept(server, tmp_path):
    """What the cache holds is what was sent, so that better cleaning needs no new download."""
    sent = (HEADER + START + STORY + END + FULL).replace("\n", "\r\n").encode("utf-8-sig")
    server.answers = {"/first": sent}
    path = fetch(server.book, tmp_path / "cache", offline=False)
    assert list((tmp_path / "cache").iterdir()) == [path]
    assert path.read_bytes() == sent
    text, record = read_text(path, "utf-8", server.book)
    assert text.decode() == STORY
    assert record["name"] == "fox.txt"


def test_second_time_takes_the_cache(server, tmp_path):
    server.answers = {"/first": PAGE}
    path = fetch(server.book, tmp_path, offline=False)
    assert fetch(server.book, tmp_path, offline=False) == path
    assert fetch(server.book, tmp_path, offline=True) == path
    assert server.asked == ["/first"]


def stall(handler) -> None:
    send(handler, PAGE[:500], len(PAGE))
    handler.server.closing.wait(5)


HTML = b"<!DOCTYPE html>\n<html><body>Log in: a tale about a fox</body></html>" * 200
FAULTS = {
    "missing": (404, 1, "HTTP 404"),
    "server error": (503, 3, "HTTP 503"),
    "too many requests": (429, 3, "HTTP 429"),
    "empty": (b"", 1, "nothing but blanks"),
    "truncated": (lambda h: send(h, PAGE[:-9], len(PAGE)), 3, "the last 9 of"),
    "cut short": (lambda h: send(h, PAGE[:500], -1), 1, "not the whole of The Fox: 500 characters"),
    "html": (HTML, 1, "a page of HTML"),
    "another": (PAGE.replace(b"fox", b"cat"), 1, "not The Fox"),
    "not text": (b"\xff" + PAGE, 1, "byte 0 .ff. is not utf-8"),
    "stalled": (stall, 3, "nothing came for 0.1 seconds"),
    "no answer": (lambda h: h.server.closing.wait(5), 3, "nothing came for 0.1 seconds"),
    "hung up": (lambda h: h.wfile.write(b"what"), 3, "what"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_download_is_never_used(server, tmp_path, fault):
    """The second address serves it; what may pass is tried three times before that."""
    answer, tries, _ = FAULTS[fault]
    server.answers = {"/first": answer, "/second": PAGE}
    assert fetch(server.book, tmp_path, offline=False).read_bytes() == PAGE
    assert server.asked == ["/first"] * tries + ["/second"]


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_download_is_told_and_leaves_nothing(server, tmp_path, fault):
    answer, tries, message = FAULTS[fault]
    server.answers = {"/first": answer, "/second": 404}
    with pytest.raises(Unavailable, match=f"The Fox: .*/first: .*{message}.*/second: HTTP"):
        fetch(server.book, tmp_path, offline=False)
    assert not list(tmp_path.iterdir())
    assert len(server.asked) == tries + 1


def test_passing_fault_is_tried_again_after_growing_pauses(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    replies = iter([503, lambda h: send(h, PAGE[:9], 99), PAGE])

    def reply(handler):
        answer = next(replies)
        if isinstance(answer, int):
            handler.send_error(answer)
        elif callable(answer):
            answer(handler)
        else:
            send(handler, answer)

    server.answers = {"/first": reply}
    assert fetch(server.book, tmp_path, offline=False).read_bytes() == PAGE
    assert pauses == list(sources.PAUSES)
