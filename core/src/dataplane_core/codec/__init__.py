"""The codec: columns to a backend's wire format and back, padded to jagged, cells to bytes."""
