"""Where the ranks meet: the one call for both roles. Knows nothing of what the links will carry."""

from flare_transport import rendezvous_peer, rendezvous_rank_zero
from flare_transport.errors import RendezvousError
from flare_transport.rendezvous_settings import Observer, RendezvousSettings, Sighting
from flare_transport.session import Group

__all__ = ["meet"]


def meet(settings: RendezvousSettings, *, observe: Observer | None = None) -> Group:
    """Meet the other ranks; blocks until all have come, at most `deadline_seconds`.

    Returns control links that are connected, authenticated and not yet started; rank zero's listener is closed by then.
    `observe` is called from any thread and must not block. Raises `RendezvousError` (missing ranks by number, or why
    this rank was refused) and `AddressError`. With a world size of 1 no port is opened.
    """
    if not 0 <= settings.rank < settings.world_size:
        raise RendezvousError(f"--rank {settings.rank} is not a rank of --world-size {settings.world_size}")
    if settings.rank == 0:
        return rendezvous_rank_zero.gather(settings, observe or _ignore)
    return rendezvous_peer.join(settings, observe or _ignore)


def _ignore(sighting: Sighting) -> None:
    del sighting
