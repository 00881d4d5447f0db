"""`StreamingDataset`: a stream of batches in the workers of a torch `DataLoader`.

Trainers use it. It is a wing of its own because its workers connect by themselves.
"""

from dataplane_core import _compiler_marks as _compiler_marks  # before tensordict
from dataplane_core.dataloader.dataset import StreamingDataset, StreamingLoader

__all__ = ["StreamingDataset", "StreamingLoader"]
