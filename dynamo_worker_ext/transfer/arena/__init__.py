"""The arena: memory of a sender that its receivers map once, on one host.

A sender writes payloads into slots of sealed memory that is touched before it is used, and hands
that memory over by a unix socket, once a receiver. A reference says where a payload lies. Reading
is then a look at that place: nothing is copied, opened or mapped for an item.

A slot is not used again while anybody may look at it:

1. The sender enters a generation, which it never uses again, into the slot's table entry when the
   payload is there, and clears it when the offer ends: with `withdraw`, or at its deadline.
2. A receiver looks for the generation, tells the sender that it holds the slot, and looks again.
3. A sender that ends an offer clears the generation first and then reads what receivers told it.
   Either it sees the hold, or the receiver sees the cleared generation: `segment_stale`.
4. A receiver that held tells the sender when nobody looks at the payload any more. If it dies,
   the end of its connection says so. Until then a slot whose offer has ended is in quarantine.

`memory` is what is shared, `slots` the sender's books, `meeting` how the two ends find each other
and what they say, `sender`, `receiver` and `link` (one receiver's end of one connection) the rest.

Huge pages are used where the kernel gives them to shared memory on demand (``shmem_enabled``), not
reserved ones: a reader who wrote to one of those would need another, or die of SIGBUS.
"""

from dynamo_worker_ext.transfer.arena.receiver import ArenaReceiver
from dynamo_worker_ext.transfer.arena.sender import ArenaSender
from dynamo_worker_ext.transfer.arena.slots import ArenaStatistics

__all__ = ["ArenaReceiver", "ArenaSender", "ArenaStatistics"]
