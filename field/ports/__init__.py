"""The ports that are judged, a file a library. A file defines `ports()`, which returns rows of `Port`."""
