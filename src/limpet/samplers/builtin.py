"""The table of built-in samplers: the name of each on a command line, and where its class is."""

GROUP = "limpet.samplers"  # entry points of other packages
BUILTIN = {
    "native": "limpet.samplers.native:Native",
    "crs": "limpet.samplers.crs:CRS",
    "mend": "limpet.samplers.mend:Mend",
    "psi": "limpet.samplers.psi:Psi",
    "ddim": "limpet.samplers.ddim:DDIM",
    "gibbs": "limpet.samplers.gibbs:Gibbs",
    "trapezoidal": "limpet.samplers.trapezoidal:Trapezoidal",
    "tau-leaping": "limpet.samplers.tau_leaping:TauLeaping",
    "forward-backward": "limpet.samplers.forward_backward:ForwardBackward",
    "rdm": "limpet.samplers.rdm:RDM",
    "confidence-threshold": "limpet.samplers.confidence_threshold:ConfidenceThreshold",
    "entropy-bound": "limpet.samplers.entropy_bound:EntropyBound",
    "block-refinement": "limpet.samplers.block_refinement:BlockRefinement",
    "gidd-adaptive": "limpet.samplers.gidd:GIDDAdaptive",
    "gidd-correction": "limpet.samplers.gidd:GIDDCorrection",
    "guided": "limpet.samplers.guided:Guided",
}
