import numpy as np

import cadam
from cadam_paper import mechanism


def test_the_figure_marks_exactly_the_steps_in_which_the_weight_of_cadam_does_not_move() -> None:
    path = mechanism.walk(cadam.CAdam)
    assert path.is_masked.any()
    np.testing.assert_array_equal(np.diff(path.weights) == 0, path.is_masked)


def test_both_optimizers_meet_the_same_gradients_until_the_first_masked_step() -> None:
    cadams, adams = mechanism.walk(cadam.CAdam), mechanism.walk(cadam.Adam)
    first = int(np.argmax(cadams.is_masked))
    np.testing.assert_array_equal(cadams.gradients[: first + 1], adams.gradients[: first + 1])
    assert np.abs(adams.weights - cadams.weights)[first + 1] > 0
