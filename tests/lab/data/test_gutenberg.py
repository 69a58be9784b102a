"""Books from a server on this machine, or from a folder; never from the internet."""

import http.server
import threading
from typing import ClassVar

import pytest

from rfa_lab.data import is_path, load_corpus, load_documents
from rfa_lab.data import sources as gutenberg

BOOK = """\ufeffThe Project Gutenberg eBook of {title}

Title: {title}

Author: Somebody

*** START OF THE PROJECT GUTENBERG EBOOK {upper} ***

Chapter 1\r
It was {number}.


*** END OF THE PROJECT GUTENBERG EBOOK {upper} ***
Licence
"""


@pytest.fixture
def site(monkeypatch, tmp_path):
    """A mirror of every book of the list; `asked` is what it was asked for, `broken` what it refuses."""
    by_number = {book.number: book for book in gutenberg.books("gutenberg:novels")}

    class Handler(http.server.BaseHTTPRequestHandler):
        asked: ClassVar[list] = []
        broken: ClassVar[set] = set()

        def do_GET(self):
            number = int(self.path.split("/")[1])
            assert self.path == f"/{number}/pg{number}.txt"
            Handler.asked.append(number)
            if number in Handler.broken:
                return self.send_error(503)
            title = by_number[number].title
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BOOK.format(title=title, upper=title.upper(), number=number).encode())

        def log_message(self, *_):
            pass

    Handler.asked, Handler.broken = [], set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("RFA_GUTENBERG_MIRROR", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("RFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RFA_GUTENBERG", raising=False)
    monkeypatch.setattr(gutenberg, "PAUSE_SECONDS", 0.0)
    yield Handler
    server.shutdown()
    server.server_close()


def authors(documents):
    return {document.name.split("_")[0] for document in documents}


def test_the_list():
    listed = gutenberg.books("gutenberg:novels")
    assert len(listed) == 92
    assert sum(book.number is not None for book in listed) == 80
    assert len({book.number for book in listed if book.number}) == 80
    assert [book.name for book in listed] == sorted(book.name for book in listed)
    for author in {book.name.split("_")[0] for book in listed}:  # whole authors in one split
        assert len({book.split for book in listed if book.name.split("_")[0] == author}) == 1
    assert not is_path("gutenberg:novels")
    with pytest.raises(ValueError, match="got 'gutenberg:plays', expected gutenberg:novels"):
        load_corpus("gutenberg:plays")


def test_books_are_fetched_once_and_split_as_the_list_says(site):
    seen = []
    corpus = load_corpus("gutenberg:novels", progress=lambda *done: seen.append(done))
    assert seen[0] == (1, 80)
    assert seen[-1] == (80, 80)
    assert authors(corpus.documents("test")) == {"Conrad", "Forster", "Schreiner", "Woolf"}
    assert authors(corpus.documents("valid")) == {"Ford", "Galsworthy", "Stevenson"}
    assert corpus.split_note == "as the list gives them"
    nostromo = next(d for d in corpus.documents("test") if d.name == "Conrad_Nostromo_1904.txt")
    assert nostromo.read() == "Chapter 1\nIt was 2021.\n"
    assert len(site.asked) == 80
    again = load_corpus(
        "gutenberg:novels", "author:test=Conrad,Forster,Schreiner,Woolf;valid=Ford,Galsworthy,Stevenson"
    )
    assert len(site.asked) == 80  # all from the cache
    assert all(again.fingerprint(split) == corpus.fingerprint(split) for split in ("train", "valid", "test"))
    assert [d.name for d in load_documents("gutenberg:novels")] == sorted(
        d.name for part in corpus.splits.values() for d in part
    )


def test_what_stopped_goes_on(site):
    site.broken = {2021}
    with pytest.raises(ValueError, match=r"tried http://.*/2021/pg2021.txt, got HTTPError.*; \d+ of 80 books") as error:
        load_corpus("gutenberg:novels")
    assert "\n" not in str(error.value)
    before, site.broken = len(site.asked), set()
    load_corpus("gutenberg:novels")
    assert len(site.asked) == 80 + 1  # the one that failed was asked for twice
    assert site.asked[before] == 2021


BOOK_2021 = gutenberg.Book("Conrad_Nostromo_1904", 2021, "Joseph Conrad", "Nostromo", "test")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Title: Nostromo\nno lines", "without its START and END lines"),
        (b"\xff\xfe", "in another encoding, expected UTF-8"),
        (b"*** START OF THE X ***\nno title\n*** END OF THE X ***\n", "with the title ''"),
        (b"Title: Lord Jim\n*** START OF THE X ***\n*** END OF THE X ***\n", "'Lord Jim', expected 'Nostromo'"),
    ],
)
def test_what_is_no_plain_text_of_the_book_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        gutenberg.body(data, BOOK_2021)


@pytest.mark.parametrize("title", ["Nostromo: A Tale\n    of the Seaboard", "NOSTROMO, a Tale", "Nóstromo"])
def test_titles_are_compared_by_their_words(title):
    text = f"Title: {title}\n\n*** START OF THIS PROJECT GUTENBERG EBOOK NOSTROMO\nA TALE ***\n\nText\n\n***END OF TH"
    assert gutenberg.body(text.encode(), BOOK_2021) == "Text\n"


def test_a_folder_stands_in(monkeypatch, tmp_path, site):
    monkeypatch.setenv("RFA_GUTENBERG", str(tmp_path / "books"))
    (tmp_path / "books").mkdir()
    for book in gutenberg.books("gutenberg:novels"):
        if book.number == 2021:  # as it is downloaded by hand
            text = BOOK.format(title=book.title, upper=book.title.upper(), number=2021)
            (tmp_path / "books" / "pg2021.txt").write_text(text, "utf-8")
        else:
            (tmp_path / "books" / f"{book.name}.txt").write_text(f"{book.title}\n", "utf-8")
    corpus = load_corpus("gutenberg:novels")
    assert sum(len(part) for part in corpus.splits.values()) == 92
    assert [d.read() for d in corpus.documents("test")][:2] == ["Almayer's Folly\n", "Chapter 1\nIt was 2021.\n"]
    assert site.asked == []
    (tmp_path / "books" / "pg2021.txt").unlink()
    with pytest.raises(ValueError, match=r"with 91 of 92 books, .* Conrad_Nostromo_1904.txt or pg2021.txt is missing"):
        load_corpus("gutenberg:novels")


def test_the_record_is_made_of_these_books(novels, monkeypatch):
    monkeypatch.setenv("RFA_GUTENBERG", str(novels))
    split_by = "author:test=Conrad,Forster,Schreiner,Woolf;valid=Ford,Galsworthy,Stevenson"
    listed, folder = load_corpus("gutenberg:novels", split_by), load_corpus(str(novels), split_by)
    assert listed.fingerprint("test") == folder.fingerprint("test")
    assert listed.fingerprint("test") == "6f7fcd6925eaa11b4df051c97f10cc747106c094522497ba6a9637c4156ca8d5"  # results/
    assert [d.name for d in listed.documents("train")] == [d.name for d in folder.documents("train")]
