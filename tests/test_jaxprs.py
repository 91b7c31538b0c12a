"""Facts that go through traced programs, from the arguments to the results."""

import jax
import jax.numpy as jnp
from jax import lax

from parallax import source_lines
from parallax.jaxprs import Following


class Arguments(Following):
    """The names of the arguments on which a value depends; `read` are those of which a sine was
    taken."""

    unknown = frozenset()

    def __init__(self):
        self.read = frozenset()

    def plain(self, eqn, operands, aval):
        if eqn.primitive.name == "sin":
            self.read |= self.met(operands)
        return self.met(operands)


def followed(f, **arguments):
    facts = Arguments()
    names = [frozenset({name}) for name in arguments]
    return facts.run(jax.make_jaxpr(f)(*arguments.values()), names), facts.read


def test_results_of_a_while_depend_on_its_condition():
    """The condition decides the number of trips, and is read itself."""

    def f(x, y, n):
        condition = lambda carry: jnp.sin(n) + carry[0] < 3
        body = lambda carry: (carry[0] + 1, carry[1] * 2, carry[2] + 1)
        return lax.while_loop(condition, body, (0.0, x, y))[1:], x

    results, read = followed(f, x=1.0, y=2.0, n=0.5)
    assert results == [frozenset("xn"), frozenset("yn"), frozenset("x")]
    assert read == frozenset("n")


def test_a_value_moves_from_carry_to_carry():
    def f(x, y):
        return lax.fori_loop(0, 5, lambda i, carry: (carry[1], carry[2], carry[2]), (x, x, y))[0]

    assert followed(f, x=1.0, y=2.0) == ([frozenset("xy")], frozenset())


def test_lines_of_a_doctest_are_the_users():
    names = {"jnp": jnp}
    exec(compile("\nf = lambda x: jnp.sin(x)", "<doctest page.md[1]>", "exec"), names)
    (sine,) = jax.make_jaxpr(names["f"])(1.0).eqns
    assert source_lines.source(sine) == "<doctest page.md[1]>:2"
