"""The demo prints what the numerical study of the paper gives."""

from cadam import demo


def test_regret_of_the_six_panels() -> None:
    regrets = {panel: (round(adam.regret, 2), round(cadam.regret, 2)) for panel, (adam, cadam) in demo.table().items()}
    assert regrets == {
        ("L1", "sudden"): (14.85, 7.87),
        ("L1", "linear"): (6.42, 4.78),
        ("L1", "sine"): (12.17, 7.70),
        ("L2", "sudden"): (8.25, 3.56),
        ("L2", "linear"): (0.93, 0.47),
        ("L2", "sine"): (0.29, 0.48),
    }
