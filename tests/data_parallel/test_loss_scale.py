from autopar.config import ParallelConfig
from autopar.data_parallel.precision import LossScale


def scale(**changes):
    settings = {"initial_scale": 8.0, "min_scale": 2.0, "max_scale": 16.0, "growth_interval": 3, "hysteresis": 2}
    return LossScale(ParallelConfig(precision="fp16", **{**settings, **changes}))


def after(one, overflows):
    seen = []
    for overflow in overflows:
        one.update(bool(overflow))
        seen.append(one.scale)
    return seen


def test_it_shrinks_when_no_chance_is_left_down_to_the_minimum():
    assert after(scale(), [1, 1, 1, 1]) == [8, 4, 2, 2]
    assert after(scale(hysteresis=1), [1, 1]) == [4, 2]
    assert after(scale(hysteresis=1, backoff_factor=0.25), [1]) == [2]


def test_chances_come_back_with_growth_and_not_before():
    assert after(scale(), [1, 0, 0, 1, 1]) == [8, 8, 8, 4, 2]
    assert after(scale(), [1, 0, 0, 0, 1, 1]) == [8, 8, 8, 16, 16, 8]


def test_it_grows_after_steps_in_a_row_up_to_the_maximum():
    assert after(scale(), [0, 0, 0, 0, 0, 0]) == [8, 8, 16, 16, 16, 16]
    assert after(scale(), [0, 0, 1, 0, 0, 0]) == [8, 8, 8, 8, 8, 16]
    assert after(scale(growth_factor=1.5), [0, 0, 0]) == [8, 8, 12]


def test_a_saved_one_goes_on_where_it_was():
    one, other = scale(), scale()
    after(one, [1, 0, 0])
    other.load_state_dict(one.state_dict())
    assert vars(other) == vars(one)
    assert after(other, [0]) == after(one, [0]) == [16]


def test_a_limit_holds_for_ever():
    one = scale()
    one.limit(4.0)
    assert (one.scale, one.max_scale, one.min_scale) == (4, 4, 2)
    assert after(one, [0] * 3) == [4, 4, 4]
    one.limit(8.0)
    assert one.max_scale == 4
