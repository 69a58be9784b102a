"""Corpora, their splits, tokenizers, and blocks of tokens."""

from rfa.checks import needs

needs("transformers")

from .corpora import Corpus, is_path, load_corpus, load_documents
from .documents import Document, check_split, check_text, fingerprint, text_document
from .stream import PreparedData, TokenBlocks, document_of_token, evenly_spaced, prepare, token_stream
from .tokenization import check_tokenizer, load_tokenizer

__all__ = [
    "Corpus",
    "Document",
    "PreparedData",
    "TokenBlocks",
    "check_split",
    "check_text",
    "check_tokenizer",
    "document_of_token",
    "evenly_spaced",
    "fingerprint",
    "is_path",
    "load_corpus",
    "load_documents",
    "load_tokenizer",
    "prepare",
    "text_document",
    "token_stream",
]
