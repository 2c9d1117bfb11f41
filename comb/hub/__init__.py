"""Publishing adapters on the Hugging Face Hub: the card beside the weights, what a push uploads, and the push.

`push` has the verbs (`write_card`, `refresh_card`, `plan_push`, `push`), `card` is how a card comes to be of `facts`
and a person's words, `redaction` keeps tokens at home. The room reads an adapter's folder, and knows no model.
"""
