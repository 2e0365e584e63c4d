"""Tests processes that are forks of a process in which TensorFlow has run."""

import os
import time

import numpy as np
import pytest

import keras_qat
from tests.helpers import images
from tests.networks.small import tiny_net

VERBS = {
    "export": keras_qat.export_tflite,
    "simulate": lambda qat: keras_qat.simulate(qat, images(2, (6, 6, 2))),
    "resolve": keras_qat.resolve,
    "verify": lambda qat: keras_qat.verify(qat, b"", images(2, (6, 6, 2))),
    "predict": lambda qat: qat.predict(images(2, (6, 6, 2)), verbose=0),
    "fit": lambda qat: qat.fit(images(2, (6, 6, 2)), np.zeros(2), verbose=0),
    "call": lambda qat: qat(images(2, (6, 6, 2))),
    "calibrate": lambda qat: keras_qat.calibrate(qat, images(2, (6, 6, 2))),
    "learn_rounding": lambda qat: keras_qat.learn_rounding(qat, images(2, (6, 6, 2))),
}


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_a_fork_says_that_it_cannot(verb):
    qat = keras_qat.quantize_model(tiny_net())
    qat.compile("sgd", "sparse_categorical_crossentropy")
    qat(images(2, (6, 6, 2)), training=True)
    pid = os.fork()
    if not pid:
        try:
            VERBS[verb](qat)
        except RuntimeError as error:
            os._exit(0 if "another process" in str(error) and "spawn" in str(error) else 1)
        finally:
            os._exit(2)
    for _ in range(300):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        pytest.fail("It waits without end.")
    assert os.waitstatus_to_exitcode(status) == 0
