"""Click models on the fields of a sample, as ONNX text in the layouts of several exporters: AutoInt, FinalMLP, GDCN."""

import numpy as np


class FieldNetworks:
    """Families of `helpers.click_networks.Network`; `layout` has the library whose exports a graph resembles."""

    def _gdcn(self):
        x0, _ = self._x0()
        x, size = x0, self._total
        for level in range(self.crosses):
            w, g = (self._weight(f"{letter}{level}", size, size, scale=0.7 / size**0.5) for letter in "WG")
            b = self._weight(f"B{level}", size, scale=0.1)
            self._add(f"w{level} = MatMul({x}, {w}) u{level} = Add(w{level}, {b}) g{level} = MatMul({x}, {g})")
            self._add(f"s{level} = Sigmoid(g{level})")
            if self.layout == "fuxictr":  # (x0 u) s
                self._add(f"p{level} = Mul({x0}, u{level}) c{level} = Mul(p{level}, s{level})")
            else:
                self._add(f"p{level} = Mul(u{level}, s{level}) c{level} = Mul({x0}, p{level})")
            self._add(f"x{level + 1} = Add(c{level}, {x})")
            x = f"x{level + 1}"
        joined = self._concat("joined", [x, self._mlp(x0, "h", size, outputs=0)])
        self._gemm(joined, "logit", size + self.hidden[-1], 1)
        return []

    def _finalmlp(self):
        names = self._lookups()
        flat = self._concat("flat", names)
        size = len(names) * self.width
        streams = []
        for stream, own in (("a", names[: self.users]), ("b", names[self.users :])):
            gated = f"{stream}f"
            if self.layout == "constant":
                self._add(f"{gated} = Mul({flat}, {self._weight(f'{stream}k', size)})")
            else:
                context = self._concat(f"{stream}c", own)
                self._gemm(context, f"{stream}g", len(own) * self.width, 10, relu=True)
                self._gemm(f"{stream}g", f"{stream}l", 10, size)
                self._add(
                    f"{stream}s = Sigmoid({stream}l) {stream}t = Mul({stream}s, two) {gated} = Mul({flat}, {stream}t)"
                )
            x = self._concat(f"{stream}x", [gated, "numbers"]) if self.numbers else gated
            streams.append(self._mlp(x, f"{stream}h", size + self.numbers, outputs=0))
        size = self.hidden[-1]
        if self.layout == "heads":
            heads = 2
            self._add(
                f"o1 = Reshape({streams[0]}, o1_shape) ow = MatMul(o1, {self._weight('F', heads, size // 2, size // 2)}) "
                f"o2 = Reshape({streams[1]}, o2_shape) oh = MatMul(ow, o2) fh = Reshape(oh, of_shape) "
                "f = ReduceSum<keepdims=1>(fh, one)",
                o1_shape=np.int64([-1, heads, 1, size // 2]),
                o2_shape=np.int64([-1, heads, size // 2, 1]),
                of_shape=np.int64([-1, heads]),
            )
        else:
            self._add(
                f"fused = MatMul({streams[0]}, {self._weight('F', size, size, scale=0.2)}) "
                f"fp = Mul(fused, {streams[1]}) f = ReduceSum<keepdims=1>(fp, one)"
            )
        self.weights |= {"one": np.int64([1])} | ({"two": np.float32(2)} if self.layout != "constant" else {})
        self._gemm(streams[0], "la", self.hidden[-1], 1)
        self._gemm(streams[1], "lb", self.hidden[-1], 1)
        self._add("lab = Add(la, lb) logit = Add(lab, f)")
        return []

    def _autoint(self):
        names = [*self._lookups(), *(self._multiplied() if self.vectors else [])]
        flat = self._concat("flat", names)
        fields, size, heads, columns = len(names), self.width, self.heads, self.columns_of_head
        rows = self.layout == "rows"
        x, inputs = "e_", size
        shape = [-1, size] if rows else [-1, fields, size]
        self._add("e_ = Reshape(flat, e_shape)", e_shape=np.int64(shape))
        for level in range(self.crosses):
            own = "qkv" if self.layout == "fuxictr" and inputs == heads * columns else "qkvr"
            parts = {role: f"{role}{level}x" for role in own}
            for name in parts.values():
                w = self._weight(f"W{name}", inputs, heads * columns, scale=1.2 / inputs**0.5)
                self._add(f"{name} = MatMul({x}, {w})")
            attended = getattr(self, "_deepctr" if self.layout == "deepctr" else "_heads")(
                level, fields, heads, columns
            )
            self._add(f"y{level} = Add({attended}, {parts.get('r', x)}) x{level + 1} = Relu(y{level})")
            x, inputs = f"x{level + 1}", heads * columns
        self._add(f"z = Reshape({x}, z_shape)", z_shape=np.int64([-1, fields * inputs]))
        self._gemm("z", "top", fields * inputs, 1)
        deep = self._concat("x_", [flat, "numbers"]) if self.numbers and not self.vectors else flat
        self._add(f"logit = Add(top, {self._mlp(deep, 'h', fields * size + (0 if self.vectors else self.numbers))})")
        return []

    def _heads(self, level, fields, heads, columns):
        """Queries, keys and values as [n, heads, fields, columns]; scores are scaled in FuxiCTR's layout.

        In the layout "flat", which imports have, values are transposed as [n, columns] by Gather.
        """
        if self.layout == "flat":
            return self._flat_heads(level, fields, heads, columns)
        for role, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            self._add(
                f"{role}{level}h = Reshape({role}{level}x, h_shape) {role}{level}t = Transpose<perm={perm}>({role}{level}h)"
            )
        self._add(f"s{level} = MatMul(q{level}t, k{level}t)", h_shape=np.int64([-1, fields, heads, columns]))
        scores = f"s{level}"
        if self.layout == "fuxictr":
            self._add(f"d{level} = Div(s{level}, root)", root=np.float32(columns**0.5))
            scores = f"d{level}"
        back = [-1, heads * columns] if self.layout == "rows" else [-1, fields, heads * columns]
        self._add(
            f"a{level} = Softmax<axis=-1>({scores}) o{level} = MatMul(a{level}, v{level}t) "
            f"ot{level} = Transpose<perm=[0, 2, 1, 3]>(o{level}) of{level} = Reshape(ot{level}, back)",
            back=np.int64(back),
        )
        return f"of{level}"

    def _flat_heads(self, level, fields, heads, columns):
        own = np.arange(fields * heads * columns).reshape(fields, heads, columns)
        shapes = {"q": (heads, fields, columns), "k": (heads, columns, fields), "v": (heads, fields, columns)}
        for role, axes in (("q", (1, 0, 2)), ("k", (1, 2, 0)), ("v", (1, 0, 2))):
            name = f"{role}{level}"
            self._add(
                f"{name}f = Reshape({name}x, flat_shape) {name}g = Gather<axis=1>({name}f, {role}_picks) "
                f"{name}t = Reshape({name}g, {role}_shape)",
                **{f"{role}_picks": own.transpose(axes).ravel(), f"{role}_shape": np.int64([-1, *shapes[role]])},
            )
        back = np.arange(own.size).reshape(heads, fields, columns).transpose(1, 0, 2).ravel()
        self._add(
            f"s{level} = MatMul(q{level}t, k{level}t) a{level} = Softmax<axis=-1>(s{level}) "
            f"o{level} = MatMul(a{level}, v{level}t) ow{level} = Reshape(o{level}, flat_shape) "
            f"og{level} = Gather<axis=1>(ow{level}, o_picks) of{level} = Reshape(og{level}, back)",
            flat_shape=np.int64([-1, own.size]),
            o_picks=back,
            back=np.int64([-1, fields, heads * columns]),
        )
        return f"of{level}"

    def _deepctr(self, level, fields, heads, columns):
        """Heads are split, and stacked along a new first axis."""
        for role in "qkv":
            parts = [f"{role}{level}_{head}" for head in range(heads)]
            self._add(f"{', '.join(parts)} = Split<axis=2>({role}{level}x, widths)", widths=np.int64([columns] * heads))
            for part in parts:
                self._add(f"{part}u = Unsqueeze({part}, zero)", zero=np.int64([0]))
            self._add(f"{role}{level}s = Concat<axis=0>({', '.join(f'{part}u' for part in parts)})")
        heads_of = [f"o{level}_{head}" for head in range(heads)]
        self._add(
            f's{level} = Einsum<equation="bnik,bnjk->bnij">(q{level}s, k{level}s) a{level} = Softmax<axis=-1>(s{level}) '
            f"o{level} = MatMul(a{level}, v{level}s) {', '.join(heads_of)} = Split<axis=0>(o{level}, ones) "
            f"oc{level} = Concat<axis=-1>({', '.join(heads_of)}) of{level} = Squeeze(oc{level}, zero)",
            ones=np.int64([1] * heads),
        )
        return f"of{level}"
