"""Click models of every family with random weights, as their exporter writes them, and inputs for them."""

import itertools

import numpy as np

from helpers.field_networks import FieldNetworks
from helpers.rewriting import model

FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "autoint", "finalmlp", "gdcn", "two-tower")
FIELDS = ((40, 1, ""), (7, 1, ""), (31, 1, ""), (25, 5, "mean"), (3, 1, ""), (60, 9, "sum"))


class Network(FieldNetworks):
    """(float model, feeds of `count` samples) of a family; fields: (rows, columns, pooling) each.

    As other libraries have it: vectors: numbers are multiplied by a vector each; beside: cross layers add their bias
    after the product, of a rank of -1: they are x_0 (w . x); relu: towers end in a ReLU; activation: instead of ReLU.
    """

    def __init__(
        self,
        family,
        fields=FIELDS,
        width=8,
        hidden=(48, 20),
        numbers=2,
        rank=6,
        crosses=2,
        seed=0,
        users=3,
        vectors=False,
        beside=False,
        relu=False,
        activation="Relu({})",
        layout="rows",
        heads=2,
        head_size=5,
    ):
        self.layout, self.heads, self.columns_of_head = layout, heads, head_size
        self.activation = activation
        self.vectors, self.beside, self.relu = vectors, beside, relu
        self.rng = np.random.default_rng(seed)
        self.family, self.fields, self.width, self.hidden, self.numbers = family, fields, width, hidden, numbers
        self.rank, self.crosses, self.users = rank, crosses, users
        self.weights, self.lines = {}, []
        self.means = [f for f, field in enumerate(fields) if field[2] == "mean"]
        self.columns = np.cumsum([0, *(field[1] for field in fields)])
        outputs = getattr(self, "_" + family.replace("-", "_"))()
        self.lines.append("probability = Sigmoid(logit)")
        inputs = [f"int32[n,{self.columns[-1]}] ids"]
        inputs += [f"float[n,{numbers}] numbers"] * bool(numbers) + [f"float[n,{len(self.means)}] scales"] * bool(
            self.means
        )
        outputs = ", ".join(["float[n,1] probability", *outputs])
        self.model = model(f"({', '.join(inputs)}) => ({outputs}) {{ {' '.join(self.lines)} }}", **self.weights)

    def feeds(self, count):
        """Random inputs; lists are filled up with their padding row."""
        ids, scales = np.zeros((count, self.columns[-1]), np.int32), np.ones((count, len(self.means)), np.float32)
        for f, (rows, size, pool) in enumerate(self.fields):
            start = self.columns[f]
            if size == 1:
                ids[:, start] = self.rng.integers(0, rows, count)
                continue
            filled = self.rng.integers(0, size + 1, count)
            ids[:, start : start + size] = np.where(
                np.arange(size) < filled[:, None], self.rng.integers(0, rows - 1, (count, size)), rows - 1
            )
            if pool == "mean":
                scales[:, self.means.index(f)] = 1 / np.maximum(filled, 1)
        batch = {"ids": ids}
        if self.numbers:
            batch["numbers"] = self.rng.standard_normal((count, self.numbers)).astype(np.float32) * 2
        return batch | ({"scales": scales} if self.means else {})

    def _weight(self, name, *shape, scale=1.0):
        self.weights[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return name

    def _add(self, line, **weights):
        self.lines.append(line)
        self.weights |= weights

    def _lookups(self, prefix="e", width=None, chosen=None, scale=0.2):
        names = []
        for f, (rows, size, pool) in enumerate(self.fields):
            if chosen is not None and f not in chosen:
                continue
            name, table = f"{prefix}{f}", self._weight(f"T{prefix}{f}", rows, width or self.width, scale=scale)
            start = int(self.columns[f])
            if size == 1:
                self._add(f"{name}i = Gather<axis=1>(ids, {name}c)", **{f"{name}c": np.int64(start)})
                self._add(f"{name} = Gather({table}, {name}i)")
            else:
                self.weights[table][-1] = 0
                spans = {f"{name}s": [start], f"{name}t": [start + size], f"{name}a": [1]}
                self._add(f"{name}i = Slice(ids, {name}s, {name}t, {name}a)", **_int64(spans))
                self._add(f"{name}r = Gather({table}, {name}i)")
                if pool == "max":
                    self._add(f"{name} = ReduceMax<axes=[1], keepdims=0>({name}r)")
                else:
                    total = f"{name}p" if pool == "mean" else name
                    self._add(f"{total} = ReduceSum<keepdims=0>({name}r, {name}a)")
                if pool == "mean":
                    index = self.means.index(f)
                    self._add(
                        f"{name}m = Slice(scales, {name}u, {name}v, {name}a) {name} = Mul({name}p, {name}m)",
                        **_int64({f"{name}u": [index], f"{name}v": [index + 1]}),
                    )
            names.append(name)
        return names

    def _concat(self, name, parts):
        self._add(f"{name} = Concat<axis=1>({', '.join(parts)})")
        return name

    def _gemm(self, x, y, inputs, outputs, relu=False, scale=1.4):
        w = self._weight(f"W{y}", outputs, inputs, scale=scale / inputs**0.5)
        b = self._weight(f"b{y}", outputs, scale=0.1)
        self._add(f"{y}{'_' if relu else ''} = Gemm<transB=1>({x}, {w}, {b})")
        if relu:
            self._add(f"{y} = {self.activation.format(f'{y}_')}")
        return y

    def _mlp(self, x, prefix, inputs, outputs=1, sizes=None, last_relu=False):
        sizes = [inputs, *(self.hidden if sizes is None else sizes)]
        for number, (a, b) in enumerate(itertools.pairwise(sizes)):
            x = self._gemm(x, f"{prefix}{number}", a, b, relu=True)
        return x if not outputs else self._gemm(x, f"{prefix}out", sizes[-1], outputs, relu=last_relu, scale=1.0)

    @property
    def _total(self):
        return len(self.fields) * self.width + self.numbers * (self.width if self.vectors else 1)

    def _multiplied(self):
        """Each number times a vector."""
        for number in range(self.numbers):
            w = self._weight(f"Wv{number}", 1, self.width, scale=0.2)
            self._add(
                f"n{number} = Gather<axis=1>(numbers, n{number}at) v{number} = MatMul(n{number}, {w})",
                **_int64({f"n{number}at": [number]}),
            )
        return [f"v{number}" for number in range(self.numbers)]

    def _x0(self):
        names = self._lookups()
        numbers = self._multiplied() if self.vectors else ["numbers"] * bool(self.numbers)
        return self._concat("x0", [*names, *numbers]), names

    def _wide(self, logit):
        wide = self._lookups("w", 1)
        for number, name in enumerate(wide):
            self._add(f"sum{number} = Add({logit}, {name})")
            logit = f"sum{number}"
        if self.numbers:
            w = self._weight("Wn", self.numbers, 1, scale=0.1)
            self._add(f"wn = MatMul(numbers, {w}) sumn = Add({logit}, wn)")
            logit = "sumn"
        return logit

    def _wide_deep(self):
        x0, _ = self._x0()
        self._add(f"logit = Identity({self._wide(self._mlp(x0, 'h', self._total))})")
        return []

    def _deepfm(self):
        names = [*self._lookups(), *(self._multiplied() if self.vectors else [])]
        flat = self._concat("flat", names)
        x0 = self._concat("x0", [flat, "numbers"]) if self.numbers and not self.vectors else flat
        logit = self._wide(self._mlp(x0, "h", self._total))
        self._add(
            f"E = Reshape({flat}, fm_shape) S = ReduceSum<keepdims=0>(E, one) SS = Mul(S, S) EE = Mul(E, E) "
            "Q = ReduceSum<keepdims=0>(EE, one) D = Sub(SS, Q) R = ReduceSum<keepdims=1>(D, one) "
            f"fm = Mul(R, half) logit = Add({logit}, fm)",
            **_int64({"fm_shape": [-1, len(names), self.width], "one": [1]}),
            half=np.float32(0.5),
        )
        return []

    def _dcn_v2(self):
        x0, _ = self._x0()
        x, size = x0, self._total
        for level in range(self.crosses):
            if self.rank < 0:
                u = self._weight(f"V{level}", size, 1, scale=1 / size**0.5)
                self._add(f"t{level} = MatMul({x}, {u})")
                u = f"t{level}"
            elif self.rank:
                v = self._weight(f"V{level}", size, self.rank, scale=1 / size**0.5)
                self._add(f"t{level} = MatMul({x}, {v})")
                u = self._gemm(f"t{level}", f"u{level}", self.rank, size, scale=0.7)
            else:
                u = self._gemm(x, f"u{level}", size, size, scale=0.7)
            product = f"p{level}"
            self._add(f"{product} = Mul({x0}, {u})")
            if self.beside:
                self._add(f"s{level} = Add({product}, {self._weight(f'B{level}', size, scale=0.3)})")
                product = f"s{level}"
            self._add(f"x{level + 1} = Add({product}, {x})")
            x = f"x{level + 1}"
        deep = self._mlp(x0, "h", size, outputs=0)
        joined = self._concat("joined", [x, deep])
        self._gemm(joined, "logit", size + self.hidden[-1], 1, scale=1.0)
        return []

    def _dlrm(self):
        z = self._mlp("numbers", "z", self.numbers, outputs=self.width, sizes=[16], last_relu=True)
        names = self._lookups()
        count = len(names) + 1
        stacked = self._concat("stacked", [z, *names])
        rows, columns = np.tril_indices(count, -1)
        self._add(
            f"X = Reshape({stacked}, x_shape) Xt = Transpose<perm=[0, 2, 1]>(X) dots = MatMul(X, Xt) "
            "all = Reshape(dots, all_shape) lower = Gather<axis=1>(all, triangle)",
            **_int64(
                {
                    "x_shape": [-1, count, self.width],
                    "all_shape": [-1, count * count],
                    "triangle": rows * count + columns,
                }
            ),
        )
        joined = self._concat("joined", [z, "lower"])
        out = self._mlp(joined, "h", self.width + len(rows))
        self._add(f"logit = Identity({out})")
        return []

    def _two_tower(self):
        names = self._lookups()
        outputs, size = [], 12 if self.width < 12 else self.width
        for side, part in (("user", names[: self.users]), ("item", names[self.users :])):
            inputs = [*part, *(["numbers"] if side == "user" and self.numbers else [])]
            width = len(part) * self.width + (self.numbers if len(inputs) > len(part) else 0)
            v = self._mlp(self._concat(f"{side}_in", inputs), f"{side}h", width, size, last_relu=self.relu)
            self._add(
                f"{side}q = Mul({v}, {v}) {side}s = ReduceSum<keepdims=1>({side}q, one) {side}e = Max({side}s, tiny) "
                f"{side}n = Sqrt({side}e) {side} = Div({v}, {side}n)",
                **_int64({"one": [1]}),
                tiny=np.float32(1e-12),
            )
            outputs.append(f"float[n,{size}] {side}")
        self._add(
            "uv = Mul(user, item) dot = ReduceSum<keepdims=1>(uv, one) logit = Gemm(dot, a, c)",
            a=np.float32([[4]]),
            c=np.float32([-0.5]),
        )
        return outputs


def _int64(values):
    return {name: np.asarray(value, np.int64) for name, value in values.items()}


def network(family, count=64, **options):
    """(float model, feeds)."""
    made = Network(family, **options)
    return made.model, made.feeds(count)
