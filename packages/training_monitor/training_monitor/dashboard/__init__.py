"""The dashboard: pages for people, over the Training Monitor's database.

Pages are rendered by the server and are whole without a script; plain modules
add charts, the player and live changes. Nothing is loaded from elsewhere and
nothing is built. A page's URL holds its whole state.

Text of models, gyms and web pages is text: it is escaped, characters that
would hide or reorder it are shown by their code points, and the pages' policy
(`site.CONTENT_SECURITY_POLICY`) lets a browser run nothing but the modules of
this package.
"""
