"""One module per chapter of the contract. Every test quotes the sentence that it proves."""
