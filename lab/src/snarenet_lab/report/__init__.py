"""Tables, figures and the page of a comparison or a reproduction, on top of `snarenet.report`."""
