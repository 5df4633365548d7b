"""Model types that a dry run, sequence parallelism or context parallelism does not take, with the reasons."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Model types whose plain forward does not run on the meta device, so that no rehearsal looks at their policies.
NOT_REHEARSED = names(
    """
    blip_2_qformer blt clap dia dots3_note_audio_encoder dots3_note_vision_encoder funnel gemma3n_audio idefics
    jetmoe instructblip instructblipvideo kosmos-2 led longformer lxmert musicgen musicgen_decoder musicgen_melody
    musicgen_melody_decoder nllb-moe pi0 pix2struct pp_formulanet qwen2_5_vl_vision qwen2_vl_vision
    qwen3_5_moe_vision qwen3_5_vision qwen3_vl_moe_vision qwen3_vl_vision sew-d siglip2 siglip2_vision_model
    speech-encoder-decoder switch_transformers udop vilt voxtral_realtime
    """
)

# Model types whose blocks sequence parallelism refuses: its rehearsal cannot run them, or they mix rows themselves.
NOT_BY_ROWS = names(
    """
    beit blip_2_qformer blt bridgetower canary clap clipseg cohere_asr cpmant data2vec-vision deberta deepseek_v4
    dia diffusion_gemma donut-swin dots3_note_audio_encoder dots3_note_vision_encoder evolla flaubert fsmt funnel
    gemma3n_audio gemma3n_text gemma4_audio glpn hiera ibert idefics inkling2 inkling2_loop inkling2_loop_text
    inkling2_text instructblip instructblipvideo jetmoe kosmos-2 lasr_ctc led lilt llama4_vision_model longformer
    lxmert mlcd mlcd_vision_model mobilebert moonshine musicgen musicgen_decoder musicgen_melody
    musicgen_melody_decoder neomme nllb-moe nystromformer parakeet_ctc pegasus_x pi0 pix2struct pixtral
    pp_formulanet prophetnet pvt_v2 qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision
    qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp qwen4_exp_text reformer sam3_lite_text_text_model seamless_m4t_v2
    segformer sew-d siglip2 siglip2_vision_model speech-encoder-decoder speecht5 splinter squeezebert swin swin2sr
    swinv2 switch_transformers timesformer udop videomae vilt vitdet voxtral_realtime wav2vec2-conformer xlm xlnet
    yolos
    """
)
# Those that are tried with sequence parallelism on four ranks, too.
ROWS_ON_FOUR = {"gpt2", "bert", "t5", "bloom", "mixtral", "mamba2", "gemma3_text", "whisper", "deepseek_v3"}

# Model types that context parallelism refuses, and which its rehearsal cannot see whole (those say so in the forward).
NOT_IN_CONTEXT = names(
    """
    aimv2_vision_model altclip_vision_model audio-spectrogram-transformer beit blip_2_qformer blip_2_vision_model
    blip_vision_model blt bridgetower canine chinese_clip_vision_model clap clip clip_vision_model clipseg
    clipseg_vision_model cpmant data2vec-audio data2vec-vision deberta deit dia diffusion_gemma dinov2
    dinov2_with_registers dinov3_vit donut-swin dots3_note_audio_encoder dots3_note_vision_encoder dpt flava
    gemma3n_audio gemma4_audio glpn hiera hubert idefics idefics2_vision idefics3_vision ijepa inkling2
    inkling2_text instructblip instructblip_vision_model instructblipvideo instructblipvideo_vision_model
    internvl_vision janus_vision_model jetmoe kosmos-2 lasr_ctc led llama4_vision_model longformer lxmert metaclip_2
    metaclip_2_vision_model mlcd mlcd_vision_model mobilevit musicgen_melody nllb-moe nystromformer omniasr_audio
    omniasr_ctc parakeet_ctc perceiver phi4_multimodal pi0 pix2struct pixio pixtral pp_formulanet prophetnet pvt
    pvt_v2 qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision qwen3_vl_moe_vision qwen3_vl_vision
    reformer segformer sew sew-d siglip siglip2 siglip2_vision_model siglip_vision_model smolvlm_vision
    speech-encoder-decoder splinter squeezebert swin swin2sr swinv2 switch_transformers timesformer tipsv2
    tipsv2_text_model tipsv2_vision_model udop unispeech unispeech-sat videomae vilt vit vit_mae vit_msn vitdet
    vivit voxtral_realtime wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm xlnet yolos
    """
)
LATE_IN_CONTEXT = names("evolla funnel instructblip_qformer instructblipvideo_qformer mllama musicgen_decoder speecht5")
# Model types whose merged folder has the names in memory: their tensors for the hub are computed, not views.
NAMES_IN_MEMORY = {"inkling2_loop", "inkling2_loop_text"}
