"""How hypothesis draws its examples in these tests."""


def same_every_time() -> None:
    """The ranks of a job must draw the same examples, and a test that passed must pass again.

    Ranks whose tests draw none never load hypothesis, and start a second sooner.
    """
    from hypothesis import settings

    settings.register_profile("tests", derandomize=True, database=None, deadline=None)
    settings.load_profile("tests")
