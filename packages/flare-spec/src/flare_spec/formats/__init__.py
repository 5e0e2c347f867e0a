"""Number formats of draft vocabulary heads and Markov heads: exact quantisers, packed layouts, reference products.

Importing this package loads no torch; its modules do, apart from :mod:`flare_spec.formats.names`.
:mod:`~flare_spec.formats.heads` prepares a head, :mod:`~flare_spec.formats.head_error` says what that costs. Nothing
here reads files, knows a model, or quantises activations: the products are weight-only.
"""
