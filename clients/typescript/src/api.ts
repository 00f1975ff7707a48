// Made by scripts/generate.mjs: do not edit.
export interface paths {
    "/generate": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        /** Generate for one prompt or a list; whole or streamed */
        put: operations["put_generate"];
        /** Generate for one prompt or a list; whole or streamed */
        post: operations["post_generate"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/get_model_info": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The served model and its chat template */
        get: operations["get_get_model_info"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/model_info": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The served model and its chat template */
        get: operations["get_model_info"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/server_info": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Options, version and current state of the engine */
        get: operations["get_server_info"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/get_server_info": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Options, version and current state of the engine */
        get: operations["get_get_server_info"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/health": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** 200 while the engine's loop moves, else 503. Reads the heartbeat only */
        get: operations["get_health"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/health_generate": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** 200 while the engine's loop moves, else 503. Reads the heartbeat only */
        get: operations["get_health_generate"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/ready": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** 200 while the engine's loop moves, else 503. Reads the heartbeat only */
        get: operations["get_ready"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/ping": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** 200 while the engine's loop moves, else 503. Reads the heartbeat only */
        get: operations["get_ping"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/version": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The release that serves */
        get: operations["get_version"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/flush_cache": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Drop cached prefixes. 400 if running requests hold some; the others are dropped. GET is for trainers: what a browser sends by it is refused, since any page may have it do so */
        get: operations["get_flush_cache"];
        put?: never;
        /** Drop cached prefixes. 400 if running requests hold some; the others are dropped. GET is for trainers: what a browser sends by it is refused, since any page may have it do so */
        post: operations["post_flush_cache"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/abort_request": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Abort requests by rid and wait for their end. Callers reach only their own */
        post: operations["post_abort_request"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/end_kv_transfer": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Offer a prompt's pages no longer: no decode engine will pull them */
        post: operations["post_end_kv_transfer"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/start_profile": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Start recording a profile of steps. 400 if one is running */
        post: operations["post_start_profile"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/stop_profile": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Write the profile for Chrome or Perfetto; returns its path on the server. 400 if none is running */
        post: operations["post_stop_profile"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/tokenize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Token ids of texts, and their number */
        post: operations["post_tokenize"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/tokenize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Token ids of texts, and their number */
        post: operations["post_v1_tokenize"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/detokenize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Texts of token ids */
        post: operations["post_detokenize"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/detokenize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Texts of token ids */
        post: operations["post_v1_detokenize"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/concate_and_append_request": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Does nothing: the original client has joined its forks' texts */
        post: operations["post_concate_and_append_request"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/models": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The served model and its LoRA adapters, as a list */
        get: operations["get_v1_models"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/models/{model}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The model of that name */
        get: operations["get_v1_models_model"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/completions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Continue one text or several */
        post: operations["post_v1_completions"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/chat/completions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Answer in a conversation */
        post: operations["post_v1_chat_completions"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/embeddings": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Vectors of texts, or of a conversation */
        post: operations["post_v1_embeddings"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/encode": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Vectors of texts or token ids, as the original's server has them */
        post: operations["post_encode"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/score": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** How alike pairs of texts are, by the cosine of their embeddings; or how likely labels are behind items */
        post: operations["post_v1_score"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/score": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** How alike pairs of texts are, by the cosine of their embeddings; or how likely labels are behind items */
        post: operations["post_score"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/rerank": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Documents by the cosine of their embedding and the query's, the best first */
        post: operations["post_v1_rerank"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/rerank": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Documents by the cosine of their embedding and the query's, the best first */
        post: operations["post_rerank"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v2/rerank": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Documents by the cosine of their embedding and the query's, the best first */
        post: operations["post_v2_rerank"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/responses": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Answer in a conversation, whose earlier turns may be stored here */
        post: operations["post_v1_responses"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/responses/input_tokens": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** How many tokens the prompt of a response would have */
        post: operations["post_v1_responses_input_tokens"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/responses/{id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** A stored response */
        get: operations["get_v1_responses_id"];
        put?: never;
        post?: never;
        /** Forget a stored response */
        delete: operations["delete_v1_responses_id"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/responses/{id}/input_items": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The items that a stored response answered, the latest first */
        get: operations["get_v1_responses_id_input_items"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/responses/{id}/cancel": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** End a response that is being answered */
        post: operations["post_v1_responses_id_cancel"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/messages": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Answer in a conversation, in Anthropic's form */
        post: operations["post_v1_messages"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/messages/count_tokens": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** How many tokens the prompt of a message would have */
        post: operations["post_v1_messages_count_tokens"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/chat": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Answer in a conversation; in lines unless stream is false */
        post: operations["post_api_chat"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/generate": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Answer a prompt; in lines unless stream is false. Raw, or without a chat template, continue it */
        post: operations["post_api_generate"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/embed": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Vectors of texts */
        post: operations["post_api_embed"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/embeddings": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** The vector of a text, of any length, as Ollama's old endpoint has it */
        post: operations["post_api_embeddings"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/tags": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The served model, as a list */
        get: operations["get_api_tags"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/ps": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The same: it is always loaded */
        get: operations["get_api_ps"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/show": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** The served model's kind, chat template and abilities */
        post: operations["post_api_show"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/version": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Our own release */
        get: operations["get_api_version"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/programs": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The caller's recent programs, latest first */
        get: operations["get_v1_programs"];
        put?: never;
        /** Check and run a program; streams its events */
        post: operations["post_v1_programs"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/programs/{id}/timeline": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** A recent program's nodes and events, in seconds since it opened */
        get: operations["get_v1_programs_id_timeline"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/programs/{id}/view": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** A recent program's text in spans beside lanes of when they came about, as part of a page */
        get: operations["get_v1_programs_id_view"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/programs/{id}/segments": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Send the next segment; its results are events */
        post: operations["post_v1_programs_id_segments"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/programs/{id}/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Resume a program's events after Last-Event-ID */
        get: operations["get_v1_programs_id_events"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/programs/{id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        post?: never;
        /** Cancel a program and release what it holds */
        delete: operations["delete_v1_programs_id"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/load_lora_adapter": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Load a LoRA adapter. 400 if its files are wrong or its name is in use */
        post: operations["post_load_lora_adapter"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/load_lora_adapter": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Load a LoRA adapter. 400 if its files are wrong or its name is in use */
        post: operations["post_v1_load_lora_adapter"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/unload_lora_adapter": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Refuse new requests with a LoRA adapter, wait for those that have it, and free it. 400 if there is none */
        post: operations["post_unload_lora_adapter"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/unload_lora_adapter": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Refuse new requests with a LoRA adapter, wait for those that have it, and free it. 400 if there is none */
        post: operations["post_v1_unload_lora_adapter"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/pause_generation": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Begin no further step, and answer when none is under way. New requests wait */
        post: operations["post_pause_generation"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/continue_generation": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Go on after a pause; while memory is released, once all of it is resumed */
        post: operations["post_continue_generation"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/release_memory_occupation": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Pause, forget all that is cached, and give memory back to a trainer on the same device. New requests wait */
        post: operations["post_release_memory_occupation"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/resume_memory_occupation": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Take memory again that was released, and go on once all is there */
        post: operations["post_resume_memory_occupation"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/update_weights_from_disk": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Replace all weights by a checkpoint's. 400 if it does not fit; the old ones stand */
        post: operations["post_update_weights_from_disk"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/update_weights_from_tensor": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Replace weights by another process's tensors. 400 if one does not fit; the old ones stand */
        post: operations["post_update_weights_from_tensor"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/update_weights_from_distributed": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Replace weights by what a trainer broadcasts. 400 if it does not fit or does not come; the old ones stand */
        post: operations["post_update_weights_from_distributed"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/init_weights_update_group": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Enter a process group with a trainer. 400 if it does not come */
        post: operations["post_init_weights_update_group"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/destroy_weights_update_group": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Leave a trainer's group. 400 if there is none */
        post: operations["post_destroy_weights_update_group"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/begin_weight_update": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Around a series of updates. Nothing is to be done: each is complete when it is answered. 400 if none would be taken */
        post: operations["post_begin_weight_update"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/end_weight_update": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Around a series of updates. Nothing is to be done: each is complete when it is answered. 400 if none would be taken */
        post: operations["post_end_weight_update"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/post_process_weights": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Around a series of updates. Nothing is to be done: each is complete when it is answered. 400 if none would be taken */
        post: operations["post_post_process_weights"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/get_weights_by_name": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** The first rows of a tensor. 400 for an unknown one */
        post: operations["post_get_weights_by_name"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/update_weight_version": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Give the present weights another name */
        post: operations["post_update_weight_version"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/get_weight_version": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** What the present weights are called */
        get: operations["get_get_weight_version"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/weight_version": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** What the present weights are called */
        get: operations["get_weight_version"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/parse_function_call": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** The calls of tools in a text that is whole, and what it says beside them */
        post: operations["post_parse_function_call"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/separate_reasoning": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** The reasoning in a text that is whole, and the rest */
        post: operations["post_separate_reasoning"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/metrics": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Metrics in Prometheus' format */
        get: operations["get_metrics"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/status": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The page's data: current counts, and latencies since the start */
        get: operations["get_v1_status"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/loads": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** What each engine has to do. `dp_rank`: one alone; `include`: sections besides core, separated by commas */
        get: operations["get_v1_loads"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/history": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The engine's counts of the last ten minutes, every two seconds */
        get: operations["get_v1_history"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/v1/requests": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The caller's requests that generate, those that go on first, and the latest of those that ended */
        get: operations["get_v1_requests"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/openapi.json": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** This description, as OpenAPI 3.1 */
        get: operations["get_openapi_json"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** The status page, which polls /v1/status */
        get: operations["get_page"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/docs": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** /openapi.json as a page, which also sends requests */
        get: operations["get_docs"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
}
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /**
         * AbortBody
         * @description Abort the requests of one rid, or all.
         */
        AbortBody: {
            /** Rid */
            rid?: string | null;
            /**
             * Abort All
             * @description Default: false.
             */
            abort_all?: boolean;
        };
        /**
         * AllTurns
         * @description All of them.
         */
        AllTurns: {
            /**
             * Type
             * @constant
             */
            type: "all";
        };
        /**
         * AllowedNames
         * @description The tools that may be called, and whether one must be.
         */
        AllowedNames: {
            /**
             * Type
             * @constant
             */
            type: "allowed_tools";
            /**
             * Mode
             * @enum {string}
             */
            mode: "auto" | "required";
            /** Tools */
            tools: components["schemas"]["ToolName"][];
        };
        /**
         * AllowedToolChoice
         * @description A choice among the described tools.
         */
        AllowedToolChoice: {
            /**
             * Type
             * @constant
             */
            type: "allowed_tools";
            allowed_tools: components["schemas"]["AllowedTools"];
        };
        /**
         * AllowedTools
         * @description The tools that may be called, and whether one must be.
         */
        AllowedTools: {
            /**
             * Mode
             * @enum {string}
             */
            mode: "auto" | "required";
            /** Tools */
            tools: (components["schemas"]["ChosenTool"] | components["schemas"]["ChosenCustom"])[];
        };
        /**
         * AssistantMessage
         * @description An answer: blocks of type text, thinking or tool_use.
         */
        AssistantMessage: {
            /** Id */
            id: string;
            /**
             * Type
             * @constant
             */
            type: "message";
            /**
             * Role
             * @constant
             */
            role: "assistant";
            /** Model */
            model: string;
            /** Content */
            content: {
                [key: string]: unknown;
            }[];
            /** Stop Reason */
            stop_reason: string | null;
            /** Stop Sequence */
            stop_sequence: string | null;
            usage: components["schemas"]["MessagesUsage"];
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            };
        };
        /**
         * CallItem
         * @description An earlier call of a function.
         */
        CallItem: {
            /**
             * Type
             * @constant
             */
            type: "function_call";
            /** Call Id */
            call_id: string;
            /** Name */
            name: string;
            /** Arguments */
            arguments: string;
            /** Id */
            id?: string | null;
        };
        /**
         * CallOutputItem
         * @description What a function answered.
         */
        CallOutputItem: {
            /**
             * Type
             * @constant
             */
            type: "function_call_output";
            /** Call Id */
            call_id: string;
            /** Output */
            output: string | components["schemas"]["TextPart"][];
            /** Id */
            id?: string | null;
        };
        /**
         * CallsBody
         * @description A text, the tools that it may call, and the format of calls; null: the server's, or any that can be told.
         */
        CallsBody: {
            /** Text */
            text: string;
            /** Tools */
            tools?: components["schemas"]["Tool"][] | null;
            /** Tool Call Parser */
            tool_call_parser?: string | null;
        };
        /**
         * ChatBody
         * @description POST /v1/chat/completions.
         */
        ChatBody: {
            /** Chat Template Kwargs */
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            /** Enable Thinking */
            enable_thinking?: boolean | null;
            thinking?: components["schemas"]["ThinkingChoice"] | null;
            /** Documents */
            documents?: {
                [key: string]: unknown;
            }[] | null;
            response_format?: components["schemas"]["ResponseFormat"] | null;
            structured_outputs?: components["schemas"]["StructuredOutputs"] | null;
            /** Regex */
            regex?: string | null;
            /** Ebnf */
            ebnf?: string | null;
            /** Json Schema */
            json_schema?: string | {
                [key: string]: unknown;
            } | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
            /** Choices */
            choices?: string[] | null;
            /** Guided Json */
            guided_json?: string | {
                [key: string]: unknown;
            } | null;
            /** Guided Regex */
            guided_regex?: string | null;
            /** Guided Choice */
            guided_choice?: string[] | null;
            /** Guided Grammar */
            guided_grammar?: string | null;
            /** Guided Json Object */
            guided_json_object?: boolean | null;
            /** Model */
            model?: string | null;
            /** Temperature */
            temperature?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Logit Bias */
            logit_bias?: {
                [key: string]: number;
            } | null;
            /** Seed */
            seed?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Min Tokens */
            min_tokens?: number | null;
            /** Repetition Penalty */
            repetition_penalty?: number | null;
            /** Ignore Eos */
            ignore_eos?: boolean | null;
            /** Stop Token Ids */
            stop_token_ids?: number[] | null;
            /** Stop Regex */
            stop_regex?: string | string[] | null;
            /** Skip Special Tokens */
            skip_special_tokens?: boolean | null;
            /** Spaces Between Special Tokens */
            spaces_between_special_tokens?: boolean | null;
            /** No Stop Trim */
            no_stop_trim?: boolean | null;
            /** Include Stop Str In Output */
            include_stop_str_in_output?: boolean | null;
            /** Priority */
            priority?: number | null;
            /** Cache Salt */
            cache_salt?: string | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Rid */
            rid?: string | null;
            /** Request Id */
            request_id?: string | null;
            /** Timeout */
            timeout?: number | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | ({
                [key: string]: unknown;
            } | null)[] | null;
            /** Max Tokens */
            max_tokens?: number | null;
            /** N */
            n?: number | null;
            /** Stop */
            stop?: string | string[] | null;
            /** Stream */
            stream?: boolean | null;
            stream_options?: components["schemas"]["sgl__runtime__server__protocol__StreamOptions"] | null;
            /** Return Token Ids */
            return_token_ids?: boolean | null;
            /** Return Tokens As Token Ids */
            return_tokens_as_token_ids?: boolean | null;
            /** Messages */
            messages: components["schemas"]["Message"][];
            /** Max Completion Tokens */
            max_completion_tokens?: number | null;
            /** Logprobs */
            logprobs?: boolean | null;
            /** Top Logprobs */
            top_logprobs?: number | null;
            /** Tools */
            tools?: (components["schemas"]["Tool"] | components["schemas"]["sgl__runtime__server__protocol__CustomTool"])[] | null;
            /** Tool Choice */
            tool_choice?: ("auto" | "none" | "required") | (components["schemas"]["ChosenTool"] | components["schemas"]["ChosenCustom"] | components["schemas"]["AllowedToolChoice"]) | null;
            /** Parallel Tool Calls */
            parallel_tool_calls?: boolean | null;
            /** Functions */
            functions?: components["schemas"]["Function"][] | null;
            /** Function Call */
            function_call?: ("none" | "auto") | components["schemas"]["ChosenName"] | null;
            /** Reasoning Effort */
            reasoning_effort?: string | number | null;
            /** Modalities */
            modalities?: "text"[] | null;
            /** Add Generation Prompt */
            add_generation_prompt?: boolean | null;
            /** Continue Final Message */
            continue_final_message?: boolean | null;
            /** Separate Reasoning */
            separate_reasoning?: boolean | null;
            /** Stream Reasoning */
            stream_reasoning?: boolean | null;
            /** Include Reasoning */
            include_reasoning?: boolean | null;
            /** Return Prompt Token Ids */
            return_prompt_token_ids?: boolean | null;
        };
        /**
         * ChatChoice
         * @description One answer.
         */
        ChatChoice: {
            /** Index */
            index: number;
            /** Finish Reason */
            finish_reason: ("stop" | "length" | "tool_calls" | "abort") | null;
            /** Matched Stop */
            matched_stop: string | number | null;
            /** Stop Reason */
            stop_reason: string | number | null;
            /** Token Ids */
            token_ids?: number[];
            message: components["schemas"]["ChatMessage"];
            logprobs: components["schemas"]["ChatLogprobs"] | null;
        };
        /**
         * ChatCompletion
         * @description The answer of /v1/chat/completions.
         */
        ChatCompletion: {
            /** Id */
            id: string;
            /**
             * Object
             * @constant
             */
            object: "chat.completion";
            /** Created */
            created: number;
            /** Model */
            model: string;
            /** Choices */
            choices: components["schemas"]["ChatChoice"][];
            usage: components["schemas"]["sgl__runtime__server__replies__Usage"];
            /** Prompt Token Ids */
            prompt_token_ids?: number[];
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | {
                [key: string]: unknown;
            }[];
        };
        /**
         * ChatLogprobs
         * @description Logprobs of a chat's answer.
         */
        ChatLogprobs: {
            /** Content */
            content: components["schemas"]["ChatTokenLogprob"][];
            /** Refusal */
            refusal: null;
        };
        /**
         * ChatMessage
         * @description The answer's turn.
         */
        ChatMessage: {
            /**
             * Role
             * @constant
             */
            role: "assistant";
            /** Content */
            content: string | null;
            /** Refusal */
            refusal: null;
            /** Reasoning Content */
            reasoning_content?: string;
            /** Tool Calls */
            tool_calls?: components["schemas"]["ChatToolCall"][];
        };
        /**
         * ChatTokenLogprob
         * @description With alternatives.
         */
        ChatTokenLogprob: {
            /** Token */
            token: string;
            /** Logprob */
            logprob: number;
            /** Bytes */
            bytes: number[];
            /** Top Logprobs */
            top_logprobs: components["schemas"]["TokenLogprob"][];
        };
        /**
         * ChatToolCall
         * @description A call.
         */
        ChatToolCall: {
            /** Id */
            id: string;
            /**
             * Type
             * @constant
             */
            type: "function";
            function: components["schemas"]["FunctionCall"];
        };
        /**
         * ChosenCustom
         * @description The custom tool to call.
         */
        ChosenCustom: {
            /**
             * Type
             * @constant
             */
            type: "custom";
            custom: components["schemas"]["ChosenName"];
        };
        /**
         * ChosenName
         * @description The name of a function to call.
         */
        ChosenName: {
            /** Name */
            name: string;
        };
        /**
         * ChosenTool
         * @description The tool to call.
         */
        ChosenTool: {
            /**
             * Type
             * @description Default: "function".
             * @constant
             */
            type?: "function";
            function: components["schemas"]["ChosenName"];
        };
        /**
         * ClearThinking
         * @description Which reasoning is forgotten: none.
         */
        ClearThinking: {
            /**
             * Type
             * @constant
             */
            type: "clear_thinking_20251015";
            /** Keep */
            keep: "all" | components["schemas"]["AllTurns"];
        };
        /**
         * ClientTool
         * @description A tool that the client runs.
         */
        ClientTool: {
            /** Type */
            type?: "custom" | null;
            /** Name */
            name: string;
            /** Description */
            description?: string | null;
            /** Input Schema */
            input_schema: {
                [key: string]: unknown;
            };
            /** Strict */
            strict?: boolean | null;
            /** Allowed Callers */
            allowed_callers?: "direct"[] | null;
        };
        /**
         * Completion
         * @description The answer of /v1/completions.
         */
        Completion: {
            /** Id */
            id: string;
            /**
             * Object
             * @constant
             */
            object: "text_completion";
            /** Created */
            created: number;
            /** Model */
            model: string;
            /** Choices */
            choices: components["schemas"]["CompletionChoice"][];
            usage: components["schemas"]["sgl__runtime__server__replies__Usage"];
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | {
                [key: string]: unknown;
            }[];
        };
        /**
         * CompletionBody
         * @description POST /v1/completions.
         */
        CompletionBody: {
            response_format?: components["schemas"]["ResponseFormat"] | null;
            structured_outputs?: components["schemas"]["StructuredOutputs"] | null;
            /** Regex */
            regex?: string | null;
            /** Ebnf */
            ebnf?: string | null;
            /** Json Schema */
            json_schema?: string | {
                [key: string]: unknown;
            } | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
            /** Choices */
            choices?: string[] | null;
            /** Guided Json */
            guided_json?: string | {
                [key: string]: unknown;
            } | null;
            /** Guided Regex */
            guided_regex?: string | null;
            /** Guided Choice */
            guided_choice?: string[] | null;
            /** Guided Grammar */
            guided_grammar?: string | null;
            /** Guided Json Object */
            guided_json_object?: boolean | null;
            /** Model */
            model?: string | null;
            /** Temperature */
            temperature?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Logit Bias */
            logit_bias?: {
                [key: string]: number;
            } | null;
            /** Seed */
            seed?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Min Tokens */
            min_tokens?: number | null;
            /** Repetition Penalty */
            repetition_penalty?: number | null;
            /** Ignore Eos */
            ignore_eos?: boolean | null;
            /** Stop Token Ids */
            stop_token_ids?: number[] | null;
            /** Stop Regex */
            stop_regex?: string | string[] | null;
            /** Skip Special Tokens */
            skip_special_tokens?: boolean | null;
            /** Spaces Between Special Tokens */
            spaces_between_special_tokens?: boolean | null;
            /** No Stop Trim */
            no_stop_trim?: boolean | null;
            /** Include Stop Str In Output */
            include_stop_str_in_output?: boolean | null;
            /** Priority */
            priority?: number | null;
            /** Cache Salt */
            cache_salt?: string | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Rid */
            rid?: string | null;
            /** Request Id */
            request_id?: string | null;
            /** Timeout */
            timeout?: number | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | ({
                [key: string]: unknown;
            } | null)[] | null;
            /** Max Tokens */
            max_tokens?: number | null;
            /** N */
            n?: number | null;
            /** Stop */
            stop?: string | string[] | null;
            /** Stream */
            stream?: boolean | null;
            stream_options?: components["schemas"]["sgl__runtime__server__protocol__StreamOptions"] | null;
            /** Return Token Ids */
            return_token_ids?: boolean | null;
            /** Return Tokens As Token Ids */
            return_tokens_as_token_ids?: boolean | null;
            /** Prompt */
            prompt: string | string[] | number[] | number[][];
            /** Echo */
            echo?: boolean | null;
            /** Logprobs */
            logprobs?: number | null;
            /** Best Of */
            best_of?: number | null;
            /** Suffix */
            suffix?: string | null;
            /** Add Special Tokens */
            add_special_tokens?: boolean | null;
        };
        /**
         * CompletionChoice
         * @description One text.
         */
        CompletionChoice: {
            /** Index */
            index: number;
            /** Finish Reason */
            finish_reason: ("stop" | "length" | "tool_calls" | "abort") | null;
            /** Matched Stop */
            matched_stop: string | number | null;
            /** Stop Reason */
            stop_reason: string | number | null;
            /** Token Ids */
            token_ids?: number[];
            /** Text */
            text: string;
            logprobs: components["schemas"]["CompletionLogprobs"] | null;
            /** Prompt Token Ids */
            prompt_token_ids?: number[];
        };
        /**
         * CompletionLogprobs
         * @description Logprobs of a completion, in lists of one length.
         */
        CompletionLogprobs: {
            /** Tokens */
            tokens: string[];
            /** Token Logprobs */
            token_logprobs: (number | null)[];
            /** Top Logprobs */
            top_logprobs: ({
                [key: string]: number;
            } | null)[] | null;
            /** Text Offset */
            text_offset: number[];
        };
        /**
         * CompletionTokensDetails
         * @description Tokens of the answers that are reasoning.
         */
        CompletionTokensDetails: {
            /** Reasoning Tokens */
            reasoning_tokens: number;
        };
        /**
         * ContextManagement
         * @description What is left out of long conversations: nothing.
         */
        ContextManagement: {
            /** Edits */
            edits?: components["schemas"]["ClearThinking"][] | null;
        };
        /**
         * CountBody
         * @description POST /v1/messages/count_tokens, and what it shares with /v1/messages.
         */
        CountBody: {
            response_format?: components["schemas"]["ResponseFormat"] | null;
            structured_outputs?: components["schemas"]["StructuredOutputs"] | null;
            /** Regex */
            regex?: string | null;
            /** Ebnf */
            ebnf?: string | null;
            /** Json Schema */
            json_schema?: string | {
                [key: string]: unknown;
            } | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
            /** Choices */
            choices?: string[] | null;
            /** Guided Json */
            guided_json?: string | {
                [key: string]: unknown;
            } | null;
            /** Guided Regex */
            guided_regex?: string | null;
            /** Guided Choice */
            guided_choice?: string[] | null;
            /** Guided Grammar */
            guided_grammar?: string | null;
            /** Guided Json Object */
            guided_json_object?: boolean | null;
            /** Model */
            model?: string | null;
            /** Temperature */
            temperature?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Logit Bias */
            logit_bias?: {
                [key: string]: number;
            } | null;
            /** Seed */
            seed?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Min Tokens */
            min_tokens?: number | null;
            /** Repetition Penalty */
            repetition_penalty?: number | null;
            /** Ignore Eos */
            ignore_eos?: boolean | null;
            /** Stop Token Ids */
            stop_token_ids?: number[] | null;
            /** Stop Regex */
            stop_regex?: string | string[] | null;
            /** Skip Special Tokens */
            skip_special_tokens?: boolean | null;
            /** Spaces Between Special Tokens */
            spaces_between_special_tokens?: boolean | null;
            /** No Stop Trim */
            no_stop_trim?: boolean | null;
            /** Include Stop Str In Output */
            include_stop_str_in_output?: boolean | null;
            /** Priority */
            priority?: number | null;
            /** Cache Salt */
            cache_salt?: string | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Rid */
            rid?: string | null;
            /** Request Id */
            request_id?: string | null;
            /** Timeout */
            timeout?: number | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | ({
                [key: string]: unknown;
            } | null)[] | null;
            /** Messages */
            messages: components["schemas"]["Turn"][];
            /** System */
            system?: string | components["schemas"]["TextBlock"][] | null;
            /** Tools */
            tools?: components["schemas"]["ClientTool"][] | null;
            tool_choice?: components["schemas"]["ToolChoice"] | null;
            thinking?: components["schemas"]["Thinking"] | null;
            output_config?: components["schemas"]["OutputConfig"] | null;
            output_format?: components["schemas"]["OutputFormat"] | null;
            context_management?: components["schemas"]["ContextManagement"] | null;
            /** Chat Template Kwargs */
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
        };
        /**
         * Custom
         * @description A tool whose input is a text.
         */
        Custom: {
            /** Name */
            name: string;
            /** Description */
            description?: string | null;
            format?: components["schemas"]["CustomFormat"] | null;
        };
        /**
         * CustomCallItem
         * @description An earlier call of a custom tool.
         */
        CustomCallItem: {
            /**
             * Type
             * @constant
             */
            type: "custom_tool_call";
            /** Call Id */
            call_id: string;
            /** Name */
            name: string;
            /** Input */
            input: string;
            /** Id */
            id?: string | null;
        };
        /**
         * CustomCallParam
         * @description A custom tool called earlier.
         */
        CustomCallParam: {
            /** Name */
            name: string;
            /** Input */
            input: string;
        };
        /**
         * CustomFormat
         * @description The form of a custom tool's input.
         */
        CustomFormat: {
            /**
             * Type
             * @enum {string}
             */
            type: "text" | "grammar";
            grammar?: components["schemas"]["Grammar"] | null;
        };
        /**
         * CustomOutputItem
         * @description What a custom tool answered.
         */
        CustomOutputItem: {
            /**
             * Type
             * @constant
             */
            type: "custom_tool_call_output";
            /** Call Id */
            call_id: string;
            /** Output */
            output: string | components["schemas"]["TextPart"][];
            /** Id */
            id?: string | null;
        };
        /**
         * CustomToolCall
         * @description A custom tool's call of an earlier answer.
         */
        CustomToolCall: {
            /** Id */
            id?: string | null;
            /**
             * Type
             * @constant
             */
            type: "custom";
            custom: components["schemas"]["CustomCallParam"];
        };
        /**
         * Deleted
         * @description It is forgotten.
         */
        Deleted: {
            /** Id */
            id: string;
            /**
             * Object
             * @constant
             */
            object: "response";
            /** Deleted */
            deleted: boolean;
        };
        /**
         * DetokenizeBody
         * @description Token ids of one text or several.
         */
        DetokenizeBody: {
            /** Tokens */
            tokens: number[] | number[][];
            /**
             * Skip Special Tokens
             * @description Default: true.
             */
            skip_special_tokens?: boolean;
        };
        /**
         * DiskBody
         * @description A checkpoint of the same model, in a folder on the server.
         */
        DiskBody: {
            /**
             * Abort All Requests
             * @description Default: false.
             */
            abort_all_requests?: boolean;
            /** Weight Version */
            weight_version?: string | null;
            /** Load Format */
            load_format?: string | null;
            /**
             * Selector
             * @description Default: "all".
             * @enum {string}
             */
            selector?: "all" | "target";
            /** Model Path */
            model_path: string;
        };
        /**
         * DistributedBody
         * @description What a trainer is about to broadcast, in order.
         */
        DistributedBody: {
            /**
             * Abort All Requests
             * @description Default: false.
             */
            abort_all_requests?: boolean;
            /** Weight Version */
            weight_version?: string | null;
            /** Load Format */
            load_format?: string | null;
            /**
             * Selector
             * @description Default: "all".
             * @enum {string}
             */
            selector?: "all" | "target";
            /** Names */
            names: string[];
            /** Dtypes */
            dtypes: string[];
            /** Shapes */
            shapes: number[][];
            /**
             * Group Name
             * @description Default: "weight_update_group".
             */
            group_name?: string;
        };
        /**
         * Document
         * @description A text to rank.
         */
        Document: {
            /** Text */
            text: string;
        };
        /**
         * Embedding
         * @description One text's.
         */
        Embedding: {
            /**
             * Object
             * @constant
             */
            object: "embedding";
            /** Index */
            index: number;
            /** Embedding */
            embedding: number[] | string;
        };
        /**
         * EmbeddingBody
         * @description POST /v1/embeddings.
         */
        EmbeddingBody: {
            /** Truncate Prompt Tokens */
            truncate_prompt_tokens?: number | null;
            /** Input */
            input?: string | string[] | number[] | number[][] | null;
            /** Messages */
            messages?: components["schemas"]["Message"][] | null;
            /**
             * Add Generation Prompt
             * @description Default: false.
             */
            add_generation_prompt?: boolean;
            /**
             * Continue Final Message
             * @description Default: false.
             */
            continue_final_message?: boolean;
            /** Chat Template Kwargs */
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            /** Model */
            model?: string | null;
            /** Encoding Format */
            encoding_format?: ("float" | "base64") | null;
            /** Dimensions */
            dimensions?: number | null;
            /**
             * Normalize
             * @description Default: true.
             */
            normalize?: boolean;
            /** Lora Path */
            lora_path?: string | null;
            /** Pooling */
            pooling?: ("last" | "mean") | null;
        };
        /**
         * Embeddings
         * @description The answer of /v1/embeddings.
         */
        Embeddings: {
            /**
             * Object
             * @constant
             */
            object: "list";
            /** Data */
            data: components["schemas"]["Embedding"][];
            /** Model */
            model: string;
            usage: components["schemas"]["PromptUsage"];
        };
        /**
         * EncodeBody
         * @description POST /encode.
         */
        EncodeBody: {
            /** Text */
            text?: string | string[] | null;
            /** Input Ids */
            input_ids?: number[] | number[][] | null;
            /** Dimensions */
            dimensions?: number | null;
            /** Pooling */
            pooling?: ("last" | "mean") | null;
        };
        /**
         * Encoded
         * @description The answer of /encode, or a list of them.
         */
        Encoded: {
            /** Embedding */
            embedding: number[];
            meta_info: components["schemas"]["MetaInfo"];
        };
        /**
         * EndedTransfers
         * @description How many of the leases named went on.
         */
        EndedTransfers: {
            /** Ended */
            ended: number;
        };
        /**
         * EngineLoad
         * @description What one engine has to do, with sections that were asked for.
         */
        EngineLoad: {
            /** Dp Rank */
            dp_rank: number;
            /** Num Running Reqs */
            num_running_reqs: number;
            /** Num Waiting Reqs */
            num_waiting_reqs: number;
            /** Num Total Reqs */
            num_total_reqs: number;
            /** Num Used Tokens */
            num_used_tokens: number;
            /** Max Total Num Tokens */
            max_total_num_tokens: number;
            /** Token Usage */
            token_usage: number;
            /** Gen Throughput */
            gen_throughput: number;
            /** Cache Hit Rate */
            cache_hit_rate: number;
            /** Utilization */
            utilization: number;
            /** Max Running Requests */
            max_running_requests: number;
            /** Memory */
            memory?: {
                [key: string]: number;
            };
            /** Speculative */
            speculative?: {
                [key: string]: number;
            };
            /** Queues */
            queues?: {
                [key: string]: number;
            };
        };
        /**
         * EngineLoads
         * @description What the engines have to do.
         */
        EngineLoads: {
            /** Timestamp */
            timestamp: string;
            /** Version */
            version: string;
            /** Dp Rank Count */
            dp_rank_count: number;
            /** Loads */
            loads: components["schemas"]["EngineLoad"][];
            /** Aggregate */
            aggregate: {
                [key: string]: number;
            };
        };
        /**
         * Error
         * @description A request that failed.
         */
        Error: {
            error: components["schemas"]["ErrorDetail"];
        };
        /**
         * ErrorDetail
         * @description What went wrong; `param` names the field.
         */
        ErrorDetail: {
            /** Message */
            message: string;
            /** Type */
            type: string;
            /** Param */
            param: string | null;
            /** Code */
            code: string | null;
        };
        /**
         * FinishReason
         * @description Why a generation ended, with what belongs to the type.
         */
        FinishReason: {
            /**
             * Type
             * @enum {string}
             */
            type: "stop" | "length" | "abort";
            /** Matched */
            matched?: string | number | null;
            /** Length */
            length?: number;
            /** Message */
            message?: string;
            /** Status Code */
            status_code?: number;
            /** Err Type */
            err_type?: string;
        };
        /**
         * Function
         * @description A function that the model may call.
         */
        Function: {
            /** Name */
            name: string;
            /** Description */
            description?: string | null;
            /** Parameters */
            parameters?: {
                [key: string]: unknown;
            } | null;
            /** Strict */
            strict?: boolean | null;
        };
        /**
         * FunctionCall
         * @description The called function; arguments as JSON text.
         */
        FunctionCall: {
            /** Name */
            name: string;
            /** Arguments */
            arguments: string;
        };
        /**
         * FunctionCallParam
         * @description A function called earlier; arguments as JSON text or parsed.
         */
        FunctionCallParam: {
            /** Name */
            name: string;
            /** Arguments */
            arguments?: string | {
                [key: string]: unknown;
            } | null;
        };
        /**
         * FunctionTool
         * @description A function that the model may call. `strict` is true unless it says otherwise.
         */
        FunctionTool: {
            /**
             * Type
             * @constant
             */
            type: "function";
            /** Name */
            name: string;
            /** Description */
            description?: string | null;
            /** Parameters */
            parameters?: {
                [key: string]: unknown;
            } | null;
            /** Strict */
            strict?: boolean | null;
            /** Allowed Callers */
            allowed_callers?: "direct"[] | null;
        };
        /**
         * GenerateBody
         * @description A null means the default; unknown fields are ignored, unknown sampling parameters refused, and so is what SGLang would do and this server does not.
         */
        GenerateBody: {
            /** Text */
            text?: string | string[] | null;
            /** Image Data */
            image_data?: unknown;
            /** Video Data */
            video_data?: unknown;
            /** Input Ids */
            input_ids?: number[] | number[][] | null;
            /** Sampling Params */
            sampling_params?: {
                [key: string]: unknown;
            } | {
                [key: string]: unknown;
            }[] | null;
            /** Return Logprob */
            return_logprob?: boolean | boolean[] | null;
            /** Logprob Start Len */
            logprob_start_len?: number | number[] | null;
            /** Top Logprobs Num */
            top_logprobs_num?: number | number[] | null;
            /** Token Ids Logprob */
            token_ids_logprob?: number[] | number[][] | null;
            /** Return Text In Logprobs */
            return_text_in_logprobs?: boolean | null;
            /** Rid */
            rid?: string | string[] | null;
            /** Priority */
            priority?: number | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | {
                [key: string]: unknown;
            }[] | null;
            /** Timeout */
            timeout?: number | null;
            /** Stream */
            stream?: boolean | null;
        };
        /**
         * Grammar
         * @description The language of a text.
         */
        Grammar: {
            /**
             * Syntax
             * @enum {string}
             */
            syntax: "lark" | "regex";
            /** Definition */
            definition: string;
        };
        /**
         * GroupBody
         * @description Where the trainer, rank 0, waits, and which rank the engine is.
         */
        GroupBody: {
            /** Master Address */
            master_address: string;
            /** Master Port */
            master_port: number;
            /** Rank Offset */
            rank_offset: number;
            /** World Size */
            world_size: number;
            /**
             * Group Name
             * @description Default: "weight_update_group".
             */
            group_name?: string;
            /**
             * Backend
             * @description Default: "nccl".
             */
            backend?: string;
        };
        /**
         * GroupNameBody
         * @description A group that was entered.
         */
        GroupNameBody: {
            /**
             * Group Name
             * @description Default: "weight_update_group".
             */
            group_name?: string;
        };
        /**
         * ImageBlock
         * @description An image.
         */
        ImageBlock: {
            /**
             * Type
             * @constant
             */
            type: "image";
            source: components["schemas"]["ImageSource"];
        };
        /**
         * ImageSource
         * @description Where an image is.
         */
        ImageSource: {
            /**
             * Type
             * @enum {string}
             */
            type: "base64" | "url";
            /** Media Type */
            media_type?: string | null;
            /** Data */
            data?: string | null;
            /** Url */
            url?: string | null;
        };
        /**
         * ImageUrl
         * @description Where an image is: a data: URL or an http one.
         */
        ImageUrl: {
            /** Url */
            url: string;
        };
        /**
         * InputBody
         * @description POST /v1/responses/input_tokens, and what it shares with /v1/responses.
         */
        InputBody: {
            /** Chat Template Kwargs */
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            /** Enable Thinking */
            enable_thinking?: boolean | null;
            thinking?: components["schemas"]["ThinkingChoice"] | null;
            /** Documents */
            documents?: {
                [key: string]: unknown;
            }[] | null;
            response_format?: components["schemas"]["ResponseFormat"] | null;
            structured_outputs?: components["schemas"]["StructuredOutputs"] | null;
            /** Regex */
            regex?: string | null;
            /** Ebnf */
            ebnf?: string | null;
            /** Json Schema */
            json_schema?: string | {
                [key: string]: unknown;
            } | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
            /** Choices */
            choices?: string[] | null;
            /** Guided Json */
            guided_json?: string | {
                [key: string]: unknown;
            } | null;
            /** Guided Regex */
            guided_regex?: string | null;
            /** Guided Choice */
            guided_choice?: string[] | null;
            /** Guided Grammar */
            guided_grammar?: string | null;
            /** Guided Json Object */
            guided_json_object?: boolean | null;
            /** Model */
            model?: string | null;
            /** Temperature */
            temperature?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Logit Bias */
            logit_bias?: {
                [key: string]: number;
            } | null;
            /** Seed */
            seed?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Min Tokens */
            min_tokens?: number | null;
            /** Repetition Penalty */
            repetition_penalty?: number | null;
            /** Ignore Eos */
            ignore_eos?: boolean | null;
            /** Stop Token Ids */
            stop_token_ids?: number[] | null;
            /** Stop Regex */
            stop_regex?: string | string[] | null;
            /** Skip Special Tokens */
            skip_special_tokens?: boolean | null;
            /** Spaces Between Special Tokens */
            spaces_between_special_tokens?: boolean | null;
            /** No Stop Trim */
            no_stop_trim?: boolean | null;
            /** Include Stop Str In Output */
            include_stop_str_in_output?: boolean | null;
            /** Priority */
            priority?: number | null;
            /** Cache Salt */
            cache_salt?: string | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Rid */
            rid?: string | null;
            /** Request Id */
            request_id?: string | null;
            /** Timeout */
            timeout?: number | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | ({
                [key: string]: unknown;
            } | null)[] | null;
            /** Input */
            input?: string | (components["schemas"]["MessageItem"] | components["schemas"]["CallItem"] | components["schemas"]["CallOutputItem"] | components["schemas"]["CustomCallItem"] | components["schemas"]["CustomOutputItem"] | components["schemas"]["ReasoningItem"] | components["schemas"]["ReferenceItem"])[] | null;
            /** Instructions */
            instructions?: string | null;
            /** Previous Response Id */
            previous_response_id?: string | null;
            /** Tools */
            tools?: (components["schemas"]["FunctionTool"] | components["schemas"]["sgl__runtime__server__responses__body__CustomTool"])[] | null;
            /** Tool Choice */
            tool_choice?: ("auto" | "none" | "required") | (components["schemas"]["ToolName"] | components["schemas"]["AllowedNames"]) | null;
            /** Parallel Tool Calls */
            parallel_tool_calls?: boolean | null;
            reasoning?: components["schemas"]["ReasoningOptions"] | null;
            text?: components["schemas"]["TextOptions"] | null;
            /** Truncation */
            truncation?: ("auto" | "disabled") | null;
        };
        /**
         * InputFormat
         * @description The form of a custom tool's input.
         */
        InputFormat: {
            /**
             * Type
             * @enum {string}
             */
            type: "text" | "grammar";
            /** Syntax */
            syntax?: ("lark" | "regex") | null;
            /** Definition */
            definition?: string | null;
        };
        /**
         * InputTokenCount
         * @description The length of a prompt.
         */
        InputTokenCount: {
            /** Input Tokens */
            input_tokens: number;
        };
        /**
         * InputTokens
         * @description The length of a prompt.
         */
        InputTokens: {
            /**
             * Object
             * @constant
             */
            object: "response.input_tokens";
            /** Input Tokens */
            input_tokens: number;
        };
        /**
         * Items
         * @description A part of the items that a response answered.
         */
        Items: {
            /**
             * Object
             * @constant
             */
            object: "list";
            /** Data */
            data: {
                [key: string]: unknown;
            }[];
            /** First Id */
            first_id: string | null;
            /** Last Id */
            last_id: string | null;
            /** Has More */
            has_more: boolean;
        };
        /**
         * LabelScores
         * @description The answer of /v1/score to a query and items: by item and label.
         */
        LabelScores: {
            /**
             * Object
             * @constant
             */
            object: "scoring";
            /** Model */
            model: string;
            /** Scores */
            scores: number[][];
            usage: components["schemas"]["PromptUsage"];
        };
        /**
         * LoadLoraBody
         * @description A name for requests, and a folder on the server as peft saves it.
         */
        LoadLoraBody: {
            /** Lora Name */
            lora_name: string;
            /** Lora Path */
            lora_path: string;
            /**
             * Pinned
             * @description Default: false.
             */
            pinned?: boolean;
        };
        /**
         * LoraUpdate
         * @description The LoRA adapters after a change: paths by name.
         */
        LoraUpdate: {
            /** Success */
            success: boolean;
            /** Error Message */
            error_message: string;
            /** Loaded Adapters */
            loaded_adapters: {
                [key: string]: string;
            };
        };
        /**
         * MemoryBody
         * @description Which memory: kv_cache, weights, cuda_graph; null: all.
         */
        MemoryBody: {
            /** Tags */
            tags?: ("kv_cache" | "weights" | "cuda_graph")[] | null;
        };
        /**
         * Message
         * @description A turn.
         */
        Message: {
            /**
             * Role
             * @enum {string}
             */
            role: "system" | "developer" | "user" | "assistant" | "tool" | "function";
            /** Content */
            content?: string | components["schemas"]["Part"][] | null;
            /** Name */
            name?: string | null;
            /** Refusal */
            refusal?: string | null;
            /** Reasoning Content */
            reasoning_content?: string | null;
            /** Reasoning */
            reasoning?: string | null;
            /** Tool Calls */
            tool_calls?: (components["schemas"]["ToolCall"] | components["schemas"]["CustomToolCall"])[] | null;
            function_call?: components["schemas"]["FunctionCallParam"] | null;
            /** Tool Call Id */
            tool_call_id?: string | null;
        };
        /**
         * MessageItem
         * @description A turn.
         */
        MessageItem: {
            /**
             * Type
             * @description Default: "message".
             * @constant
             */
            type?: "message";
            /**
             * Role
             * @enum {string}
             */
            role: "user" | "assistant" | "system" | "developer";
            /** Content */
            content: string | components["schemas"]["TextPart"][];
            /** Id */
            id?: string | null;
        };
        /**
         * MessagesBody
         * @description POST /v1/messages.
         */
        MessagesBody: {
            response_format?: components["schemas"]["ResponseFormat"] | null;
            structured_outputs?: components["schemas"]["StructuredOutputs"] | null;
            /** Regex */
            regex?: string | null;
            /** Ebnf */
            ebnf?: string | null;
            /** Json Schema */
            json_schema?: string | {
                [key: string]: unknown;
            } | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
            /** Choices */
            choices?: string[] | null;
            /** Guided Json */
            guided_json?: string | {
                [key: string]: unknown;
            } | null;
            /** Guided Regex */
            guided_regex?: string | null;
            /** Guided Choice */
            guided_choice?: string[] | null;
            /** Guided Grammar */
            guided_grammar?: string | null;
            /** Guided Json Object */
            guided_json_object?: boolean | null;
            /** Model */
            model?: string | null;
            /** Temperature */
            temperature?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Logit Bias */
            logit_bias?: {
                [key: string]: number;
            } | null;
            /** Seed */
            seed?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Min Tokens */
            min_tokens?: number | null;
            /** Repetition Penalty */
            repetition_penalty?: number | null;
            /** Ignore Eos */
            ignore_eos?: boolean | null;
            /** Stop Token Ids */
            stop_token_ids?: number[] | null;
            /** Stop Regex */
            stop_regex?: string | string[] | null;
            /** Skip Special Tokens */
            skip_special_tokens?: boolean | null;
            /** Spaces Between Special Tokens */
            spaces_between_special_tokens?: boolean | null;
            /** No Stop Trim */
            no_stop_trim?: boolean | null;
            /** Include Stop Str In Output */
            include_stop_str_in_output?: boolean | null;
            /** Priority */
            priority?: number | null;
            /** Cache Salt */
            cache_salt?: string | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Rid */
            rid?: string | null;
            /** Request Id */
            request_id?: string | null;
            /** Timeout */
            timeout?: number | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | ({
                [key: string]: unknown;
            } | null)[] | null;
            /** Messages */
            messages: components["schemas"]["Turn"][];
            /** System */
            system?: string | components["schemas"]["TextBlock"][] | null;
            /** Tools */
            tools?: components["schemas"]["ClientTool"][] | null;
            tool_choice?: components["schemas"]["ToolChoice"] | null;
            thinking?: components["schemas"]["Thinking"] | null;
            output_config?: components["schemas"]["OutputConfig"] | null;
            output_format?: components["schemas"]["OutputFormat"] | null;
            context_management?: components["schemas"]["ContextManagement"] | null;
            /** Chat Template Kwargs */
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            /** Max Tokens */
            max_tokens: number;
            /** Stop Sequences */
            stop_sequences?: string[] | null;
            /** Stream */
            stream?: boolean | null;
        };
        /**
         * MessagesError
         * @description A request that failed.
         */
        MessagesError: {
            /**
             * Type
             * @constant
             */
            type: "error";
            error: components["schemas"]["MessagesErrorDetail"];
            /** Request Id */
            request_id: string;
        };
        /**
         * MessagesErrorDetail
         * @description What went wrong.
         */
        MessagesErrorDetail: {
            /** Type */
            type: string;
            /** Message */
            message: string;
            /** Details */
            details?: {
                [key: string]: unknown;
            };
        };
        /**
         * MessagesUsage
         * @description Token counts; `input_tokens` has those that were not cached.
         */
        MessagesUsage: {
            /** Input Tokens */
            input_tokens: number;
            /** Cache Creation Input Tokens */
            cache_creation_input_tokens: number;
            /** Cache Read Input Tokens */
            cache_read_input_tokens: number;
            /** Output Tokens */
            output_tokens: number;
        };
        /**
         * MetaInfo
         * @description Counts, times in seconds, and the logprobs that were asked for.
         */
        MetaInfo: {
            /** Id */
            id: string;
            finish_reason: components["schemas"]["FinishReason"] | null;
            /** Prompt Tokens */
            prompt_tokens: number;
            /** Completion Tokens */
            completion_tokens: number;
            /** Forced Tokens */
            forced_tokens: number;
            /** Cached Tokens */
            cached_tokens: number;
            /** Num Retractions */
            num_retractions: number;
            /** Queue Time */
            queue_time: number | null;
            /** Prefill Time */
            prefill_time: number | null;
            /** E2E Latency */
            e2e_latency: number;
            /** Weight Version */
            weight_version: string;
            /** Drafted Tokens */
            drafted_tokens?: number;
            /** Accepted Tokens */
            accepted_tokens?: number;
            /** Matched Regex */
            matched_regex?: string;
            /** Input Token Logprobs */
            input_token_logprobs?: (number | string | null)[][];
            /** Output Token Logprobs */
            output_token_logprobs?: (number | string | null)[][];
            /** Output Token Logprobs Length */
            output_token_logprobs_length?: number;
            /** Input Top Logprobs */
            input_top_logprobs?: ((number | string | null)[][] | null)[];
            /** Output Top Logprobs */
            output_top_logprobs?: ((number | string | null)[][] | null)[];
            /** Input Token Ids Logprobs */
            input_token_ids_logprobs?: ((number | string | null)[][] | null)[];
            /** Output Token Ids Logprobs */
            output_token_ids_logprobs?: ((number | string | null)[][] | null)[];
        };
        /**
         * Model
         * @description A model, or a LoRA adapter of it.
         */
        Model: {
            /** Id */
            id: string;
            /**
             * Object
             * @constant
             */
            object: "model";
            /** Created */
            created: number;
            /** Owned By */
            owned_by: string;
            /**
             * Type
             * @constant
             */
            type: "model";
            /** Display Name */
            display_name: string;
            /** Created At */
            created_at: string;
            /** Root */
            root: string;
            /** Parent */
            parent: string | null;
            /** Max Model Len */
            max_model_len: number;
            /** Input Modalities */
            input_modalities: ("text" | "image" | "video")[];
        };
        /**
         * ModelInfo
         * @description The served model.
         */
        ModelInfo: {
            /** Model Path */
            model_path: string;
            /** Tokenizer Path */
            tokenizer_path: string;
            /** Served Model Name */
            served_model_name: string;
            /** Is Generation */
            is_generation: boolean;
            /** Preferred Sampling Params */
            preferred_sampling_params: {
                [key: string]: unknown;
            } | null;
            /** Context Length */
            context_length: number;
            /** Has Image Understanding */
            has_image_understanding: boolean;
            /** Reasoning Parser */
            reasoning_parser: string | null;
            /** Weight Version */
            weight_version: string;
            /** Chat Template */
            chat_template: string | null;
            /** Special Tokens */
            special_tokens: {
                [key: string]: string;
            };
            /** Engine */
            engine: string;
            /** Programs */
            programs: boolean;
            /** Version */
            version: string;
        };
        /**
         * Models
         * @description The served one, and its LoRA adapters.
         */
        Models: {
            /**
             * Object
             * @constant
             */
            object: "list";
            /** Data */
            data: components["schemas"]["Model"][];
            /** First Id */
            first_id: string;
            /** Last Id */
            last_id: string;
            /** Has More */
            has_more: boolean;
        };
        /**
         * NamedSchema
         * @description A JSON Schema with a name.
         */
        NamedSchema: {
            /** Name */
            name?: string | null;
            /** Description */
            description?: string | null;
            /** Schema */
            schema?: {
                [key: string]: unknown;
            } | null;
            /** Strict */
            strict?: boolean | null;
        };
        /**
         * Ok
         * @description It is done, or all is well.
         */
        Ok: {
            /**
             * Status
             * @constant
             */
            status: "ok";
        };
        /**
         * OllamaCall
         * @description A tool call of an earlier answer.
         */
        OllamaCall: {
            /** Id */
            id?: string | null;
            function: components["schemas"]["OllamaFunction"];
        };
        /**
         * OllamaChat
         * @description The answer of /api/chat.
         */
        OllamaChat: {
            /** Model */
            model: string;
            /** Created At */
            created_at: string;
            /** Done */
            done: boolean;
            /** Done Reason */
            done_reason?: string;
            /** Total Duration */
            total_duration?: number;
            /** Load Duration */
            load_duration?: number;
            /** Prompt Eval Count */
            prompt_eval_count?: number;
            /** Prompt Eval Duration */
            prompt_eval_duration?: number;
            /** Eval Count */
            eval_count?: number;
            /** Eval Duration */
            eval_duration?: number;
            /** Logprobs */
            logprobs?: components["schemas"]["ChatTokenLogprob"][];
            message: components["schemas"]["OllamaTurn"];
        };
        /**
         * OllamaChatBody
         * @description POST /api/chat.
         */
        OllamaChatBody: {
            /** Model */
            model?: string | null;
            /** Stream */
            stream?: boolean | null;
            /** Format */
            format?: ("" | "json") | {
                [key: string]: unknown;
            } | null;
            options?: components["schemas"]["OllamaOptions"] | null;
            /** Think */
            think?: boolean | ("low" | "medium" | "high" | "max") | null;
            /** Logprobs */
            logprobs?: boolean | null;
            /** Top Logprobs */
            top_logprobs?: number | null;
            /** Keep Alive */
            keep_alive?: number | string | null;
            /** Messages */
            messages?: components["schemas"]["OllamaMessage"][] | null;
            /** Tools */
            tools?: components["schemas"]["Tool"][] | null;
        };
        /**
         * OllamaDetails
         * @description A model's kind.
         */
        OllamaDetails: {
            /** Parent Model */
            parent_model: string;
            /** Format */
            format: string;
            /** Family */
            family: string;
            /** Families */
            families: string[];
            /** Parameter Size */
            parameter_size: string;
            /** Quantization Level */
            quantization_level: string;
        };
        /**
         * OllamaEmbedBody
         * @description POST /api/embed.
         */
        OllamaEmbedBody: {
            /** Model */
            model?: string | null;
            /** Input */
            input: string | string[];
            /** Truncate */
            truncate?: boolean | null;
            /** Dimensions */
            dimensions?: number | null;
            /** Keep Alive */
            keep_alive?: number | string | null;
        };
        /**
         * OllamaEmbedding
         * @description The answer of /api/embeddings.
         */
        OllamaEmbedding: {
            /** Embedding */
            embedding: number[];
        };
        /**
         * OllamaEmbeddingBody
         * @description POST /api/embeddings, the old form.
         */
        OllamaEmbeddingBody: {
            /** Model */
            model?: string | null;
            /** Prompt */
            prompt: string;
            /** Keep Alive */
            keep_alive?: number | string | null;
        };
        /**
         * OllamaEmbeddings
         * @description The answer of /api/embed; times in nanoseconds.
         */
        OllamaEmbeddings: {
            /** Model */
            model: string;
            /** Embeddings */
            embeddings: number[][];
            /** Total Duration */
            total_duration: number;
            /** Load Duration */
            load_duration: number;
            /** Prompt Eval Count */
            prompt_eval_count: number;
        };
        /**
         * OllamaError
         * @description A request that failed.
         */
        OllamaError: {
            /** Error */
            error: string;
        };
        /**
         * OllamaFunction
         * @description A function called earlier.
         */
        OllamaFunction: {
            /** Name */
            name: string;
            /** Arguments */
            arguments: {
                [key: string]: unknown;
            };
        };
        /**
         * OllamaFunctionCall
         * @description The called function.
         */
        OllamaFunctionCall: {
            /** Name */
            name: string;
            /** Arguments */
            arguments: {
                [key: string]: unknown;
            };
        };
        /**
         * OllamaGenerateBody
         * @description POST /api/generate.
         */
        OllamaGenerateBody: {
            /** Model */
            model?: string | null;
            /** Stream */
            stream?: boolean | null;
            /** Format */
            format?: ("" | "json") | {
                [key: string]: unknown;
            } | null;
            options?: components["schemas"]["OllamaOptions"] | null;
            /** Think */
            think?: boolean | ("low" | "medium" | "high" | "max") | null;
            /** Logprobs */
            logprobs?: boolean | null;
            /** Top Logprobs */
            top_logprobs?: number | null;
            /** Keep Alive */
            keep_alive?: number | string | null;
            /** Prompt */
            prompt?: string | null;
            /** Images */
            images?: string[] | null;
            /** System */
            system?: string | null;
            /** Raw */
            raw?: boolean | null;
        };
        /**
         * OllamaGenerated
         * @description The answer of /api/generate.
         */
        OllamaGenerated: {
            /** Model */
            model: string;
            /** Created At */
            created_at: string;
            /** Done */
            done: boolean;
            /** Done Reason */
            done_reason?: string;
            /** Total Duration */
            total_duration?: number;
            /** Load Duration */
            load_duration?: number;
            /** Prompt Eval Count */
            prompt_eval_count?: number;
            /** Prompt Eval Duration */
            prompt_eval_duration?: number;
            /** Eval Count */
            eval_count?: number;
            /** Eval Duration */
            eval_duration?: number;
            /** Logprobs */
            logprobs?: components["schemas"]["ChatTokenLogprob"][];
            /** Response */
            response: string;
            /** Thinking */
            thinking?: string;
        };
        /**
         * OllamaMessage
         * @description A turn.
         */
        OllamaMessage: {
            /**
             * Role
             * @enum {string}
             */
            role: "system" | "user" | "assistant" | "tool";
            /** Content */
            content?: string | null;
            /** Thinking */
            thinking?: string | null;
            /** Images */
            images?: string[] | null;
            /** Tool Calls */
            tool_calls?: components["schemas"]["OllamaCall"][] | null;
            /** Tool Name */
            tool_name?: string | null;
            /** Tool Call Id */
            tool_call_id?: string | null;
        };
        /**
         * OllamaModel
         * @description A model; while it runs, also until when.
         */
        OllamaModel: {
            /** Name */
            name: string;
            /** Model */
            model: string;
            /** Modified At */
            modified_at: string;
            /** Size */
            size: number;
            /** Digest */
            digest: string;
            details: components["schemas"]["OllamaDetails"];
            /** Expires At */
            expires_at?: string;
            /** Size Vram */
            size_vram?: number;
            /** Context Length */
            context_length?: number;
        };
        /**
         * OllamaModels
         * @description All of them: one.
         */
        OllamaModels: {
            /** Models */
            models: components["schemas"]["OllamaModel"][];
        };
        /**
         * OllamaOptions
         * @description Sampling. What loads a model (num_ctx, num_gpu, …) has no effect: it is loaded.
         */
        OllamaOptions: {
            /** Num Predict */
            num_predict?: number | null;
            /** Temperature */
            temperature?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Seed */
            seed?: number | null;
            /** Stop */
            stop?: string | string[] | null;
            /** Repeat Penalty */
            repeat_penalty?: number | null;
            /** Repeat Last N */
            repeat_last_n?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
        };
        /**
         * OllamaShowBody
         * @description POST /api/show.
         */
        OllamaShowBody: {
            /** Model */
            model?: string | null;
            /** Name */
            name?: string | null;
        };
        /**
         * OllamaShown
         * @description More of a model.
         */
        OllamaShown: {
            /** Modelfile */
            modelfile: string;
            /** Parameters */
            parameters: string;
            /** Template */
            template: string;
            details: components["schemas"]["OllamaDetails"];
            /** Model Info */
            model_info: {
                [key: string]: unknown;
            };
            /** Capabilities */
            capabilities: string[];
            /** Modified At */
            modified_at: string;
        };
        /**
         * OllamaToolCall
         * @description A call.
         */
        OllamaToolCall: {
            /** Id */
            id: string;
            function: components["schemas"]["OllamaFunctionCall"];
        };
        /**
         * OllamaTurn
         * @description The answer's turn, or what a line adds to it.
         */
        OllamaTurn: {
            /**
             * Role
             * @constant
             */
            role: "assistant";
            /** Content */
            content: string;
            /** Thinking */
            thinking?: string;
            /** Tool Calls */
            tool_calls?: components["schemas"]["OllamaToolCall"][];
        };
        /**
         * OutputConfig
         * @description Options of the answer.
         */
        OutputConfig: {
            /** Effort */
            effort?: string | null;
            format?: components["schemas"]["OutputFormat"] | null;
        };
        /**
         * OutputFormat
         * @description The form of the answer's text.
         */
        OutputFormat: {
            /**
             * Type
             * @constant
             */
            type: "json_schema";
            /** Schema */
            schema: {
                [key: string]: unknown;
            };
        };
        /**
         * PairScore
         * @description Of two texts.
         */
        PairScore: {
            /**
             * Object
             * @constant
             */
            object: "score";
            /** Index */
            index: number;
            /** Score */
            score: number;
        };
        /**
         * PairScores
         * @description The answer of /v1/score to text_1 and text_2.
         */
        PairScores: {
            /** Id */
            id: string;
            /**
             * Object
             * @constant
             */
            object: "list";
            /** Created */
            created: number;
            /** Model */
            model: string;
            /** Data */
            data: components["schemas"]["PairScore"][];
            usage: components["schemas"]["PromptUsage"];
        };
        /**
         * ParsedCall
         * @description A call: its number, the tool's name, and the arguments as JSON text.
         */
        ParsedCall: {
            /** Tool Index */
            tool_index: number;
            /** Name */
            name: string;
            /** Parameters */
            parameters: string;
        };
        /**
         * ParsedCalls
         * @description The calls in a text, and what it says beside them.
         */
        ParsedCalls: {
            /** Normal Text */
            normal_text: string;
            /** Calls */
            calls: components["schemas"]["ParsedCall"][];
        };
        /**
         * Part
         * @description A piece of a message's content: a text or an image.
         */
        Part: {
            /** Type */
            type: string;
            /** Text */
            text?: string | null;
            /** Refusal */
            refusal?: string | null;
            /** Image Url */
            image_url?: components["schemas"]["ImageUrl"] | string | null;
            /** Image */
            image?: string | null;
        };
        /**
         * PauseBody
         * @description What becomes of generations under way.
         */
        PauseBody: {
            /**
             * Mode
             * @description Default: "abort".
             * @enum {string}
             */
            mode?: "abort" | "retract" | "in_place";
        };
        /**
         * Profile
         * @description Where the profile is, on the server.
         */
        Profile: {
            /** Path */
            path: string;
        };
        /**
         * ProgramBody
         * @description A program and its first segment (schemas `ir_program`, `ir_segment`); with rows, one final segment for all.
         */
        ProgramBody: {
            /** Program */
            program: {
                [key: string]: unknown;
            };
            /** Segment */
            segment?: {
                [key: string]: unknown;
            } | null;
            /** Rows */
            rows?: components["schemas"]["Row"][] | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: ({
                [key: string]: unknown;
            } | null)[] | null;
        };
        /**
         * ProgramId
         * @description A program.
         */
        ProgramId: {
            /** Id */
            id: string;
        };
        /**
         * ProgramPages
         * @description What a prefill engine offers of the rows' beginnings; null: of none of them.
         */
        ProgramPages: {
            /** Kv Transfer Params */
            kv_transfer_params: ({
                [key: string]: unknown;
            } | null)[] | null;
        };
        /**
         * ProgramSummary
         * @description An entry of the list of programs.
         */
        ProgramSummary: {
            /** Id */
            id: string;
            /** Name */
            name: string;
            /** Started */
            started: number;
            /** Is Running */
            is_running: boolean;
            /** Num Nodes */
            num_nodes: number;
        };
        /**
         * PromptTokensDetails
         * @description Tokens of the prompt that were cached.
         */
        PromptTokensDetails: {
            /** Cached Tokens */
            cached_tokens: number;
        };
        /**
         * PromptUsage
         * @description Tokens of the prompts.
         */
        PromptUsage: {
            /** Prompt Tokens */
            prompt_tokens: number;
            /** Total Tokens */
            total_tokens: number;
        };
        /**
         * Rank
         * @description One document's.
         */
        Rank: {
            /** Index */
            index: number;
            /** Relevance Score */
            relevance_score: number;
            /** Document */
            document?: {
                [key: string]: unknown;
            };
        };
        /**
         * Ranks
         * @description The answer of /v1/rerank, the best first.
         */
        Ranks: {
            /** Id */
            id: string;
            /** Model */
            model: string;
            /** Results */
            results: components["schemas"]["Rank"][];
            usage: components["schemas"]["PromptUsage"];
        };
        /**
         * ReasoningBody
         * @description A text, and the model family that wrote it.
         */
        ReasoningBody: {
            /** Text */
            text: string;
            /** Reasoning Parser */
            reasoning_parser: string;
        };
        /**
         * ReasoningItem
         * @description Earlier reasoning.
         */
        ReasoningItem: {
            /**
             * Type
             * @constant
             */
            type: "reasoning";
            /** Id */
            id?: string | null;
            /** Summary */
            summary?: components["schemas"]["ReasoningText"][] | null;
            /** Content */
            content?: components["schemas"]["ReasoningText"][] | null;
        };
        /**
         * ReasoningOptions
         * @description Options of reasoning. Answers hold the reasoning itself, and no summary.
         */
        ReasoningOptions: {
            /** Effort */
            effort?: string | null;
            /** Mode */
            mode?: "standard" | null;
        };
        /**
         * ReasoningText
         * @description A piece of reasoning or of its summary.
         */
        ReasoningText: {
            /** Text */
            text: string;
        };
        /**
         * RedactedBlock
         * @description Reasoning of another server, which nobody can read.
         */
        RedactedBlock: {
            /**
             * Type
             * @constant
             */
            type: "redacted_thinking";
        };
        /**
         * ReferenceItem
         * @description An item of a stored response, by its id.
         */
        ReferenceItem: {
            /**
             * Type
             * @description Default: "item_reference".
             * @constant
             */
            type?: "item_reference";
            /** Id */
            id: string;
        };
        /**
         * ReleasedMemory
         * @description Memory was given back: bytes by tag.
         */
        ReleasedMemory: {
            /** Message */
            message: string;
            /** Status */
            status: string;
            /** Released */
            released: {
                [key: string]: number;
            };
        };
        /**
         * RequestRecord
         * @description A request that generates. Its tokens are those of its finished outputs; `status` is null while it goes on.
         */
        RequestRecord: {
            /** Id */
            id: string;
            /** Path */
            path: string;
            /** Started */
            started: number;
            /** Seconds */
            seconds: number;
            /** Status */
            status: number | null;
            /** Prompt Tokens */
            prompt_tokens: number;
            /** Cached Tokens */
            cached_tokens: number;
            /** Completion Tokens */
            completion_tokens: number;
            /** Outputs */
            outputs: number;
        };
        /**
         * RerankBody
         * @description POST /v1/rerank.
         */
        RerankBody: {
            /** Truncate Prompt Tokens */
            truncate_prompt_tokens?: number | null;
            /** Query */
            query: string;
            /** Documents */
            documents: (string | components["schemas"]["Document"])[];
            /** Model */
            model?: string | null;
            /** Top N */
            top_n?: number | null;
            /**
             * Return Documents
             * @description Default: true.
             */
            return_documents?: boolean;
            /** Pooling */
            pooling?: ("last" | "mean") | null;
        };
        /**
         * Response
         * @description An answer: items of type message, reasoning, function_call or custom_tool_call.
         */
        Response: {
            /** Id */
            id: string;
            /**
             * Object
             * @constant
             */
            object: "response";
            /** Created At */
            created_at: number;
            /**
             * Status
             * @enum {string}
             */
            status: "completed" | "incomplete" | "in_progress" | "cancelled" | "failed";
            /** Error */
            error: {
                [key: string]: unknown;
            } | null;
            /** Incomplete Details */
            incomplete_details: {
                [key: string]: string;
            } | null;
            /** Metadata */
            metadata: {
                [key: string]: string;
            };
            /** Model */
            model: string;
            /** Output */
            output: {
                [key: string]: unknown;
            }[];
            /** Previous Response Id */
            previous_response_id: string | null;
            /** Store */
            store: boolean;
            usage: components["schemas"]["sgl__runtime__server__responses__replies__Usage"] | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            };
        };
        /**
         * ResponseFormat
         * @description The form of the whole answer.
         */
        ResponseFormat: {
            /**
             * Type
             * @enum {string}
             */
            type: "text" | "json_object" | "json_schema" | "structural_tag";
            json_schema?: components["schemas"]["NamedSchema"] | null;
            /** Schema */
            schema?: {
                [key: string]: unknown;
            } | null;
            /** Format */
            format?: {
                [key: string]: unknown;
            } | null;
            /** Structures */
            structures?: unknown[] | null;
            /** Triggers */
            triggers?: string[] | null;
            /** At Least One */
            at_least_one?: boolean | null;
            /** Stop After First */
            stop_after_first?: boolean | null;
        };
        /**
         * ResponsesBody
         * @description POST /v1/responses.
         */
        ResponsesBody: {
            /** Chat Template Kwargs */
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            /** Enable Thinking */
            enable_thinking?: boolean | null;
            thinking?: components["schemas"]["ThinkingChoice"] | null;
            /** Documents */
            documents?: {
                [key: string]: unknown;
            }[] | null;
            /** Metadata */
            metadata?: {
                [key: string]: string;
            } | null;
            /** Store */
            store?: boolean | null;
            response_format?: components["schemas"]["ResponseFormat"] | null;
            structured_outputs?: components["schemas"]["StructuredOutputs"] | null;
            /** Regex */
            regex?: string | null;
            /** Ebnf */
            ebnf?: string | null;
            /** Json Schema */
            json_schema?: string | {
                [key: string]: unknown;
            } | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
            /** Choices */
            choices?: string[] | null;
            /** Guided Json */
            guided_json?: string | {
                [key: string]: unknown;
            } | null;
            /** Guided Regex */
            guided_regex?: string | null;
            /** Guided Choice */
            guided_choice?: string[] | null;
            /** Guided Grammar */
            guided_grammar?: string | null;
            /** Guided Json Object */
            guided_json_object?: boolean | null;
            /** Model */
            model?: string | null;
            /** Temperature */
            temperature?: number | null;
            /** Top P */
            top_p?: number | null;
            /** Frequency Penalty */
            frequency_penalty?: number | null;
            /** Presence Penalty */
            presence_penalty?: number | null;
            /** Logit Bias */
            logit_bias?: {
                [key: string]: number;
            } | null;
            /** Seed */
            seed?: number | null;
            /** Top K */
            top_k?: number | null;
            /** Min P */
            min_p?: number | null;
            /** Min Tokens */
            min_tokens?: number | null;
            /** Repetition Penalty */
            repetition_penalty?: number | null;
            /** Ignore Eos */
            ignore_eos?: boolean | null;
            /** Stop Token Ids */
            stop_token_ids?: number[] | null;
            /** Stop Regex */
            stop_regex?: string | string[] | null;
            /** Skip Special Tokens */
            skip_special_tokens?: boolean | null;
            /** Spaces Between Special Tokens */
            spaces_between_special_tokens?: boolean | null;
            /** No Stop Trim */
            no_stop_trim?: boolean | null;
            /** Include Stop Str In Output */
            include_stop_str_in_output?: boolean | null;
            /** Priority */
            priority?: number | null;
            /** Cache Salt */
            cache_salt?: string | null;
            /** Extra Key */
            extra_key?: string | null;
            /** Lora Path */
            lora_path?: string | (string | null)[] | null;
            /** Rid */
            rid?: string | null;
            /** Request Id */
            request_id?: string | null;
            /** Timeout */
            timeout?: number | null;
            /** Return Kv Transfer Params */
            return_kv_transfer_params?: boolean | null;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            } | ({
                [key: string]: unknown;
            } | null)[] | null;
            /** Input */
            input?: string | (components["schemas"]["MessageItem"] | components["schemas"]["CallItem"] | components["schemas"]["CallOutputItem"] | components["schemas"]["CustomCallItem"] | components["schemas"]["CustomOutputItem"] | components["schemas"]["ReasoningItem"] | components["schemas"]["ReferenceItem"])[] | null;
            /** Instructions */
            instructions?: string | null;
            /** Previous Response Id */
            previous_response_id?: string | null;
            /** Tools */
            tools?: (components["schemas"]["FunctionTool"] | components["schemas"]["sgl__runtime__server__responses__body__CustomTool"])[] | null;
            /** Tool Choice */
            tool_choice?: ("auto" | "none" | "required") | (components["schemas"]["ToolName"] | components["schemas"]["AllowedNames"]) | null;
            /** Parallel Tool Calls */
            parallel_tool_calls?: boolean | null;
            reasoning?: components["schemas"]["ReasoningOptions"] | null;
            text?: components["schemas"]["TextOptions"] | null;
            /** Truncation */
            truncation?: ("auto" | "disabled") | null;
            /** Max Output Tokens */
            max_output_tokens?: number | null;
            /** Top Logprobs */
            top_logprobs?: number | null;
            /** Include */
            include?: ("message.output_text.logprobs" | "reasoning.encrypted_content" | "message.input_image.image_url" | "file_search_call.results" | "web_search_call.results" | "web_search_call.action.sources" | "computer_call_output.output.image_url" | "code_interpreter_call.outputs")[] | null;
            /** Stream */
            stream?: boolean | null;
            stream_options?: components["schemas"]["sgl__runtime__server__responses__body__StreamOptions"] | null;
            /** Stop */
            stop?: string | string[] | null;
        };
        /**
         * Result
         * @description One generation; `index` tells those of a stream apart.
         */
        Result: {
            /** Text */
            text: string;
            /** Output Ids */
            output_ids: number[];
            meta_info: components["schemas"]["MetaInfo"];
            /** Index */
            index?: number;
            /** Kv Transfer Params */
            kv_transfer_params?: {
                [key: string]: unknown;
            };
        };
        /**
         * Row
         * @description What is a row's own.
         */
        Row: {
            /** Args */
            args?: {
                [key: string]: string;
            };
            /** Seed */
            seed?: number | null;
        };
        /**
         * Sample
         * @description The engine's counts at a time, in seconds since the epoch; null while it did not serve.
         */
        Sample: {
            /** Time */
            time: number;
            /** Engine */
            engine: {
                [key: string]: number;
            } | null;
        };
        /**
         * Samples
         * @description The last minutes, oldest first.
         */
        Samples: {
            /** Samples */
            samples: components["schemas"]["Sample"][];
        };
        /**
         * ScoreBody
         * @description POST /v1/score. With text_1 and text_2: how alike texts are. With query, items and label_token_ids: how likely
         *     these tokens are behind each item.
         */
        ScoreBody: {
            /** Truncate Prompt Tokens */
            truncate_prompt_tokens?: number | null;
            /** Model */
            model?: string | null;
            /** Text 1 */
            text_1?: string | string[] | null;
            /** Text 2 */
            text_2?: string | string[] | null;
            /** Pooling */
            pooling?: ("last" | "mean") | null;
            /** Query */
            query?: string | number[] | null;
            /** Items */
            items?: string | string[] | number[][] | null;
            /** Label Token Ids */
            label_token_ids?: number[] | null;
            /**
             * Apply Softmax
             * @description Default: false.
             */
            apply_softmax?: boolean;
            /**
             * Item First
             * @description Default: false.
             */
            item_first?: boolean;
        };
        /**
         * SegmentBody
         * @description The next segment, of the schema `ir_segment`. Numbered from 1, it may be sent again.
         */
        SegmentBody: {
            /** Segment */
            segment: {
                [key: string]: unknown;
            };
            /** Number */
            number?: number | null;
        };
        /**
         * SeparatedReasoning
         * @description A text's reasoning, and the rest.
         */
        SeparatedReasoning: {
            /** Reasoning Text */
            reasoning_text: string;
            /** Text */
            text: string;
        };
        /**
         * SeriesBody
         * @description Of which model weights are about to come.
         */
        SeriesBody: {
            /**
             * Selector
             * @description Default: "all".
             * @enum {string}
             */
            selector?: "all" | "target";
        };
        /**
         * ServerInfo
         * @description Every option as it was resolved, and the engine's state.
         */
        ServerInfo: {
            /** Served Model Name */
            served_model_name: string;
            /** Grpc Port */
            grpc_port: number | null;
            /** Version */
            version: string;
            /** Startup Time */
            startup_time: number;
            /** Internal States */
            internal_states: {
                [key: string]: unknown;
            }[];
        };
        /**
         * Status
         * @description What the page shows.
         */
        Status: {
            /** Model */
            model: string;
            /** Time */
            time: number;
            /** Started */
            started: number;
            /** Open Requests */
            open_requests: number;
            /** Max Total Tokens */
            max_total_tokens: number;
            /** Engine */
            engine: {
                [key: string]: unknown;
            };
            /** Latency */
            latency: {
                [key: string]: {
                    [key: string]: number | null;
                };
            };
            /** Responses */
            responses: (string | number)[][];
        };
        /**
         * StatusMessage
         * @description A change was made.
         */
        StatusMessage: {
            /** Message */
            message: string;
            /** Status */
            status: string;
        };
        /**
         * StructuredOutputs
         * @description vLLM's; one of the first six.
         */
        StructuredOutputs: {
            /** Json */
            json?: string | {
                [key: string]: unknown;
            } | null;
            /** Regex */
            regex?: string | null;
            /** Choice */
            choice?: string[] | null;
            /** Grammar */
            grammar?: string | null;
            /** Json Object */
            json_object?: boolean | null;
            /** Structural Tag */
            structural_tag?: string | {
                [key: string]: unknown;
            } | null;
        };
        /**
         * TensorBody
         * @description Tensors as torch.multiprocessing's pickler ships them, as base64: one text, or one for each rank.
         */
        TensorBody: {
            /**
             * Abort All Requests
             * @description Default: false.
             */
            abort_all_requests?: boolean;
            /** Weight Version */
            weight_version?: string | null;
            /** Load Format */
            load_format?: string | null;
            /**
             * Selector
             * @description Default: "all".
             * @enum {string}
             */
            selector?: "all" | "target";
            /** Serialized Named Tensors */
            serialized_named_tensors: string[];
        };
        /**
         * TextBlock
         * @description A text.
         */
        TextBlock: {
            /**
             * Type
             * @constant
             */
            type: "text";
            /** Text */
            text: string;
        };
        /**
         * TextFormat
         * @description The form of the answer's text.
         */
        TextFormat: {
            /**
             * Type
             * @enum {string}
             */
            type: "text" | "json_object" | "json_schema";
            /** Name */
            name?: string | null;
            /** Description */
            description?: string | null;
            /** Schema */
            schema?: {
                [key: string]: unknown;
            } | null;
            /** Strict */
            strict?: boolean | null;
        };
        /**
         * TextOptions
         * @description Options of the answer's text.
         */
        TextOptions: {
            format?: components["schemas"]["TextFormat"] | null;
        };
        /**
         * TextPart
         * @description A piece of a message or of a tool's output: a text or an image.
         */
        TextPart: {
            /** Type */
            type: string;
            /** Text */
            text?: string | null;
            /** Refusal */
            refusal?: string | null;
            /** Image Url */
            image_url?: string | null;
        };
        /**
         * Texts
         * @description The text, or one for each list of tokens.
         */
        Texts: {
            /** Text */
            text: string | string[];
        };
        /**
         * Thinking
         * @description Whether to reason, for models whose template can say so; `budget_tokens` is advice that none takes.
         */
        Thinking: {
            /**
             * Type
             * @enum {string}
             */
            type: "enabled" | "adaptive" | "between_tools" | "disabled";
            /** Display */
            display?: ("summarized" | "omitted") | null;
        };
        /**
         * ThinkingBlock
         * @description Earlier reasoning.
         */
        ThinkingBlock: {
            /**
             * Type
             * @constant
             */
            type: "thinking";
            /** Thinking */
            thinking: string;
        };
        /**
         * ThinkingChoice
         * @description Whether to reason, as DeepSeek's, GLM's and Kimi's services take it; auto: as the template does.
         */
        ThinkingChoice: {
            /**
             * Type
             * @enum {string}
             */
            type: "enabled" | "disabled" | "auto";
        };
        /**
         * Timeline
         * @description Its nodes, and its events with the seconds `at` which they came.
         */
        Timeline: {
            /** Id */
            id: string;
            /** Name */
            name: string;
            /** Started */
            started: number;
            /** Is Running */
            is_running: boolean;
            /** Num Nodes */
            num_nodes: number;
            /** Nodes */
            nodes: {
                [key: string]: unknown;
            }[];
            /** Events */
            events: {
                [key: string]: unknown;
            }[];
        };
        /**
         * TokenLogprob
         * @description A token's logprob.
         */
        TokenLogprob: {
            /** Token */
            token: string;
            /** Logprob */
            logprob: number;
            /** Bytes */
            bytes: number[];
        };
        /**
         * TokenizeBody
         * @description One text or several.
         */
        TokenizeBody: {
            /** Text */
            text?: string | string[] | null;
            /** Prompt */
            prompt?: string | string[] | null;
            /**
             * Add Special Tokens
             * @description Default: true.
             */
            add_special_tokens?: boolean;
            /**
             * Allow Special
             * @description Default: true.
             */
            allow_special?: boolean;
        };
        /**
         * Tokens
         * @description Token ids and their number, of one text or of each.
         */
        Tokens: {
            /** Tokens */
            tokens: number[] | number[][];
            /** Count */
            count: number | number[];
            /** Max Model Len */
            max_model_len: number;
        };
        /**
         * Tool
         * @description A tool: a function.
         */
        Tool: {
            /**
             * Type
             * @description Default: "function".
             * @constant
             */
            type?: "function";
            function: components["schemas"]["Function"];
        };
        /**
         * ToolCall
         * @description A tool call of an earlier answer.
         */
        ToolCall: {
            /** Id */
            id?: string | null;
            /**
             * Type
             * @description Default: "function".
             * @constant
             */
            type?: "function";
            function: components["schemas"]["FunctionCallParam"];
        };
        /**
         * ToolChoice
         * @description Which tools may or must be called.
         */
        ToolChoice: {
            /**
             * Type
             * @enum {string}
             */
            type: "auto" | "any" | "tool" | "none";
            /** Name */
            name?: string | null;
            /** Disable Parallel Tool Use */
            disable_parallel_tool_use?: boolean | null;
        };
        /**
         * ToolName
         * @description A tool by its name.
         */
        ToolName: {
            /**
             * Type
             * @enum {string}
             */
            type: "function" | "custom";
            /** Name */
            name: string;
        };
        /**
         * ToolResultBlock
         * @description What a tool answered.
         */
        ToolResultBlock: {
            /**
             * Type
             * @constant
             */
            type: "tool_result";
            /** Tool Use Id */
            tool_use_id: string;
            /** Content */
            content?: string | (components["schemas"]["TextBlock"] | components["schemas"]["ImageBlock"])[] | null;
            /** Is Error */
            is_error?: boolean | null;
        };
        /**
         * ToolUseBlock
         * @description An earlier call of a tool.
         */
        ToolUseBlock: {
            /**
             * Type
             * @constant
             */
            type: "tool_use";
            /** Id */
            id: string;
            /** Name */
            name: string;
            /** Input */
            input: {
                [key: string]: unknown;
            };
        };
        /**
         * TransferBody
         * @description What a prefill engine answered, of one prompt or of several.
         */
        TransferBody: {
            /** Kv Transfer Params */
            kv_transfer_params: {
                [key: string]: unknown;
            } | {
                [key: string]: unknown;
            }[];
        };
        /**
         * Turn
         * @description A turn; a system's changes the instructions from there on.
         */
        Turn: {
            /**
             * Role
             * @enum {string}
             */
            role: "user" | "assistant" | "system";
            /** Content */
            content: string | (components["schemas"]["TextBlock"] | components["schemas"]["ImageBlock"] | components["schemas"]["ToolUseBlock"] | components["schemas"]["ToolResultBlock"] | components["schemas"]["ThinkingBlock"] | components["schemas"]["RedactedBlock"])[];
        };
        /**
         * UnloadLoraBody
         * @description The name of a loaded adapter.
         */
        UnloadLoraBody: {
            /** Lora Name */
            lora_name: string;
        };
        /**
         * Version
         * @description The release that serves.
         */
        Version: {
            /** Version */
            version: string;
        };
        /**
         * VersionBody
         * @description What the present weights are called from now on.
         */
        VersionBody: {
            /** New Version */
            new_version: string;
            /**
             * Abort All Requests
             * @description Default: true.
             */
            abort_all_requests?: boolean;
        };
        /**
         * WeightBody
         * @description A tensor's name in a checkpoint, and how many of its rows are wanted.
         */
        WeightBody: {
            /** Name */
            name: string;
            /**
             * Truncate Size
             * @description Default: 100.
             */
            truncate_size?: number;
        };
        /**
         * WeightUpdate
         * @description Whether weights, or a group that they come from, were changed.
         */
        WeightUpdate: {
            /** Success */
            success: boolean;
            /** Message */
            message: string;
            /** Num Paused Requests */
            num_paused_requests: number;
            /** New Version */
            new_version?: string;
        };
        /**
         * WeightVersion
         * @description What the last update called its weights, or "default".
         */
        WeightVersion: {
            /** Weight Version */
            weight_version: string;
        };
        /**
         * CustomTool
         * @description A custom tool.
         */
        sgl__runtime__server__protocol__CustomTool: {
            /**
             * Type
             * @constant
             */
            type: "custom";
            custom: components["schemas"]["Custom"];
        };
        /**
         * StreamOptions
         * @description What a stream carries besides chunks.
         */
        sgl__runtime__server__protocol__StreamOptions: {
            /** Include Usage */
            include_usage?: boolean | null;
            /** Continuous Usage Stats */
            continuous_usage_stats?: boolean | null;
            /** Include Obfuscation */
            include_obfuscation?: boolean | null;
        };
        /**
         * Usage
         * @description Token counts.
         */
        sgl__runtime__server__replies__Usage: {
            /** Prompt Tokens */
            prompt_tokens: number;
            /** Completion Tokens */
            completion_tokens: number;
            /** Total Tokens */
            total_tokens: number;
            prompt_tokens_details: components["schemas"]["PromptTokensDetails"];
            completion_tokens_details?: components["schemas"]["CompletionTokensDetails"];
        };
        /**
         * CustomTool
         * @description A tool whose input is a text.
         */
        sgl__runtime__server__responses__body__CustomTool: {
            /**
             * Type
             * @constant
             */
            type: "custom";
            /** Name */
            name: string;
            /** Description */
            description?: string | null;
            format?: components["schemas"]["InputFormat"] | null;
            /** Allowed Callers */
            allowed_callers?: "direct"[] | null;
        };
        /**
         * StreamOptions
         * @description Options of a stream; its last event always has the usage.
         */
        sgl__runtime__server__responses__body__StreamOptions: Record<string, never>;
        /**
         * Usage
         * @description Token counts.
         */
        sgl__runtime__server__responses__replies__Usage: {
            /** Input Tokens */
            input_tokens: number;
            /** Input Tokens Details */
            input_tokens_details: {
                [key: string]: number;
            };
            /** Output Tokens */
            output_tokens: number;
            /** Output Tokens Details */
            output_tokens_details: {
                [key: string]: number;
            };
            /** Total Tokens */
            total_tokens: number;
        };
        ir_program: {
            /** @constant */
            v: 1;
            name: string;
            seed: number;
            defaults?: {
                max_tokens?: number;
                min_tokens?: number;
                n?: number;
                stop?: string[];
                stop_token_ids?: number[];
                stop_regex?: string[];
                temperature?: number;
                top_p?: number;
                top_k?: number;
                min_p?: number;
                frequency_penalty?: number;
                presence_penalty?: number;
                repetition_penalty?: number;
                ignore_eos?: boolean;
                return_logprob?: boolean;
                logprob_start_len?: number;
                top_logprobs_num?: number;
                return_text_in_logprobs?: boolean;
                seed?: number;
                logit_bias?: Record<string, never>;
                priority?: number;
                timeout?: number;
                extra?: Record<string, never>;
            };
            args?: {
                [key: string]: string;
            };
            stream?: boolean;
            lease_s?: number;
            deadline_s?: number | null;
            chat_template?: string | null;
            speculate_tokens?: number | null;
        };
        ir_segment: {
            nodes: (components["schemas"]["ir_text"] | components["schemas"]["ir_arg"] | components["schemas"]["ir_role_begin"] | components["schemas"]["ir_role_end"] | components["schemas"]["ir_media"] | components["schemas"]["ir_gen"] | components["schemas"]["ir_select"] | components["schemas"]["ir_ref"] | components["schemas"]["ir_scope_begin"] | components["schemas"]["ir_scope_end"] | components["schemas"]["ir_fork"] | components["schemas"]["ir_join"] | components["schemas"]["ir_set"] | components["schemas"]["ir_tool_results"])[];
            answers?: {
                st: number;
                index: number;
                turns: {
                    role: string | null;
                    content: string;
                    name?: string | null;
                    call_id?: string | null;
                }[];
            }[];
            final?: boolean;
        };
        ir_text: {
            st: number;
            /** @constant */
            op: "text";
            text: string;
        };
        ir_arg: {
            st: number;
            /** @constant */
            op: "arg";
            name: string;
        };
        ir_role_begin: {
            st: number;
            /** @constant */
            op: "role_begin";
            role: string;
        };
        ir_role_end: {
            st: number;
            /** @constant */
            op: "role_end";
            role: string;
        };
        ir_media: {
            st: number;
            /** @constant */
            op: "media";
            /** @enum {unknown} */
            kind: "image" | "video";
            data: string;
            fps?: number | null;
        };
        ir_gen: {
            st: number;
            /** @constant */
            op: "gen";
            name?: string | null;
            params?: {
                max_tokens?: number;
                min_tokens?: number;
                n?: number;
                stop?: string[];
                stop_token_ids?: number[];
                stop_regex?: string[];
                temperature?: number;
                top_p?: number;
                top_k?: number;
                min_p?: number;
                frequency_penalty?: number;
                presence_penalty?: number;
                repetition_penalty?: number;
                ignore_eos?: boolean;
                return_logprob?: boolean;
                logprob_start_len?: number;
                top_logprobs_num?: number;
                return_text_in_logprobs?: boolean;
                seed?: number;
                logit_bias?: Record<string, never>;
                priority?: number;
                timeout?: number;
                extra?: Record<string, never>;
            };
            constraint?: {
                regex?: string;
                json?: Record<string, never>;
                ebnf?: string;
            };
            /** @enum {unknown} */
            dtype?: "int" | "float" | "bool" | "str";
            /** @enum {unknown} */
            reasoning?: "apertus" | "apertus2509" | "apriel" | "cohere_command3" | "cohere_command4" | "deepseek-r1" | "deepseek-v3" | "deepseek-v4" | "deepseek_r1" | "deepseek_v3" | "deepseek_v4" | "gemma4" | "glm45" | "glm47" | "gigachat35" | "gpt-oss" | "granite" | "holo2" | "hunyuan" | "hy_v3" | "interns1" | "kimi" | "kimi_k2" | "kimi_k3" | "ling3" | "mimo" | "minicpm3" | "minimax" | "minimax-m3" | "minimax_m2" | "minimax_m3" | "mistral" | "nemotron_3" | "nemotron_v3" | "olmo3" | "openai_gptoss" | "poolside_v1" | "qwen3" | "qwen3-thinking" | "seed_oss" | "solar_open2" | "step3" | "step3p5" | "telechat4";
            tools?: Record<string, never>[];
        };
        ir_select: {
            st: number;
            /** @constant */
            op: "select";
            name: string | null;
            choices: string[];
            /** @enum {unknown} */
            method?: "token_length_normalized" | "greedy_token_selection" | "unconditional_likelihood_normalized";
        };
        ir_ref: {
            st: number;
            /** @constant */
            op: "ref";
            stream: number;
            index: number;
            functions?: ([
                "strip" | "lower" | "upper"
            ] | [
                "split",
                string | null,
                number
            ] | [
                "slice",
                number | null,
                number | null
            ] | [
                "replace",
                string,
                string
            ])[];
        };
        ir_scope_begin: {
            st: number;
            /** @constant */
            op: "scope_begin";
            name: string;
        };
        ir_scope_end: {
            st: number;
            /** @constant */
            op: "scope_end";
            name: string;
        };
        ir_fork: {
            st: number;
            /** @constant */
            op: "fork";
            children: number[];
        };
        ir_join: {
            st: number;
            /** @constant */
            op: "join";
            children: number[];
            /** @enum {unknown} */
            mode?: "gather" | "append" | "absorb";
        };
        ir_set: {
            st: number;
            /** @constant */
            op: "set";
            name: string;
            value: string;
        };
        ir_tool_results: {
            st: number;
            /** @constant */
            op: "tool_results";
            index: number;
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export interface operations {
    put_generate: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "Once upon a time",
                 *       "sampling_params": {
                 *         "max_new_tokens": 16
                 *       }
                 *     }
                 */
                "application/json": components["schemas"]["GenerateBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Result"] | components["schemas"]["Result"][];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_generate: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "Once upon a time",
                 *       "sampling_params": {
                 *         "max_new_tokens": 16
                 *       }
                 *     }
                 */
                "application/json": components["schemas"]["GenerateBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Result"] | components["schemas"]["Result"][];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_get_model_info: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ModelInfo"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_model_info: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ModelInfo"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_server_info: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ServerInfo"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_get_server_info: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ServerInfo"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_health: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ok"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_health_generate: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ok"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_ready: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ok"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_ping: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ok"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_version: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Version"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_flush_cache: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/plain": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_flush_cache: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/plain": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_abort_request: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "rid": "mine"
                 *     }
                 */
                "application/json": components["schemas"]["AbortBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ok"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_end_kv_transfer: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "kv_transfer_params": []
                 *     }
                 */
                "application/json": components["schemas"]["TransferBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["EndedTransfers"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_start_profile: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ok"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_stop_profile: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Profile"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_tokenize: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["TokenizeBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Tokens"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_tokenize: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["TokenizeBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Tokens"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_detokenize: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "tokens": [
                 *         5,
                 *         6,
                 *         7
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["DetokenizeBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Texts"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_detokenize: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "tokens": [
                 *         5,
                 *         6,
                 *         7
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["DetokenizeBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Texts"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_concate_and_append_request: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": {
                        [key: string]: unknown;
                    };
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_models: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Models"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_models_model: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                model: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Model"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_completions: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "prompt": "Once upon a time",
                 *       "max_tokens": 16
                 *     }
                 */
                "application/json": components["schemas"]["CompletionBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Completion"];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_chat_completions: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "messages": [
                 *         {
                 *           "role": "user",
                 *           "content": "Hello"
                 *         }
                 *       ],
                 *       "max_tokens": 16
                 *     }
                 */
                "application/json": components["schemas"]["ChatBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ChatCompletion"];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_embeddings: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "input": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["EmbeddingBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Embeddings"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_encode: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["EncodeBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Encoded"] | components["schemas"]["Encoded"][];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_score: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text_1": "a cat",
                 *       "text_2": [
                 *         "a kitten",
                 *         "a car"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["ScoreBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["PairScores"] | components["schemas"]["LabelScores"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_score: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text_1": "a cat",
                 *       "text_2": [
                 *         "a kitten",
                 *         "a car"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["ScoreBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["PairScores"] | components["schemas"]["LabelScores"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_rerank: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "query": "a cat",
                 *       "documents": [
                 *         "a car",
                 *         "a kitten"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["RerankBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ranks"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_rerank: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "query": "a cat",
                 *       "documents": [
                 *         "a car",
                 *         "a kitten"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["RerankBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ranks"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v2_rerank: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "query": "a cat",
                 *       "documents": [
                 *         "a car",
                 *         "a kitten"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["RerankBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Ranks"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_responses: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "input": "Hello",
                 *       "max_output_tokens": 16
                 *     }
                 */
                "application/json": components["schemas"]["ResponsesBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Response"];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_responses_input_tokens: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "input": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["InputBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["InputTokens"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_responses_id: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Response"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    delete_v1_responses_id: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Deleted"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_responses_id_input_items: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Items"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_responses_id_cancel: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Response"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_messages: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "messages": [
                 *         {
                 *           "role": "user",
                 *           "content": "Hello"
                 *         }
                 *       ],
                 *       "max_tokens": 16
                 *     }
                 */
                "application/json": components["schemas"]["MessagesBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AssistantMessage"];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
        };
    };
    post_v1_messages_count_tokens: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "messages": [
                 *         {
                 *           "role": "user",
                 *           "content": "Hello"
                 *         }
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["CountBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["InputTokenCount"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MessagesError"];
                };
            };
        };
    };
    post_api_chat: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "messages": [
                 *         {
                 *           "role": "user",
                 *           "content": "Hello"
                 *         }
                 *       ],
                 *       "options": {
                 *         "num_predict": 16
                 *       },
                 *       "stream": false
                 *     }
                 */
                "application/json": components["schemas"]["OllamaChatBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaChat"];
                    "application/x-ndjson": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    post_api_generate: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "prompt": "Once upon a time",
                 *       "options": {
                 *         "num_predict": 16
                 *       },
                 *       "stream": false
                 *     }
                 */
                "application/json": components["schemas"]["OllamaGenerateBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaGenerated"];
                    "application/x-ndjson": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    post_api_embed: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "input": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["OllamaEmbedBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaEmbeddings"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    post_api_embeddings: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "prompt": "Hello"
                 *     }
                 */
                "application/json": components["schemas"]["OllamaEmbeddingBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaEmbedding"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    get_api_tags: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaModels"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    get_api_ps: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaModels"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    post_api_show: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "model": ""
                 *     }
                 */
                "application/json": components["schemas"]["OllamaShowBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaShown"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    get_api_version: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Version"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["OllamaError"];
                };
            };
        };
    };
    get_v1_programs: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProgramSummary"][];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_programs: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "program": {
                 *         "v": 1,
                 *         "name": "p",
                 *         "seed": 1
                 *       },
                 *       "segment": {
                 *         "nodes": [
                 *           {
                 *             "st": 0,
                 *             "op": "text",
                 *             "text": "Hello"
                 *           },
                 *           {
                 *             "st": 0,
                 *             "op": "gen",
                 *             "name": "x",
                 *             "params": {
                 *               "max_tokens": 8
                 *             }
                 *           }
                 *         ],
                 *         "final": true
                 *       }
                 *     }
                 */
                "application/json": components["schemas"]["ProgramBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProgramPages"];
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_programs_id_timeline: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Timeline"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_programs_id_view: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/html": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_programs_id_segments: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SegmentBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProgramId"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_programs_id_events: {
        parameters: {
            query?: never;
            header?: {
                "Last-Event-ID"?: string;
            };
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": unknown;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    delete_v1_programs_id: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProgramId"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_load_lora_adapter: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "lora_name": "sql",
                 *       "lora_path": "path/to/adapter"
                 *     }
                 */
                "application/json": components["schemas"]["LoadLoraBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LoraUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_load_lora_adapter: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "lora_name": "sql",
                 *       "lora_path": "path/to/adapter"
                 *     }
                 */
                "application/json": components["schemas"]["LoadLoraBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LoraUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_unload_lora_adapter: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "lora_name": "sql"
                 *     }
                 */
                "application/json": components["schemas"]["UnloadLoraBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LoraUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_v1_unload_lora_adapter: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "lora_name": "sql"
                 *     }
                 */
                "application/json": components["schemas"]["UnloadLoraBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LoraUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_pause_generation: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "mode": "retract"
                 *     }
                 */
                "application/json": components["schemas"]["PauseBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StatusMessage"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_continue_generation: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StatusMessage"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_release_memory_occupation: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "tags": [
                 *         "kv_cache"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["MemoryBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ReleasedMemory"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_resume_memory_occupation: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /** @example {} */
                "application/json": components["schemas"]["MemoryBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StatusMessage"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_update_weights_from_disk: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "model_path": "path/to/checkpoint"
                 *     }
                 */
                "application/json": components["schemas"]["DiskBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_update_weights_from_tensor: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "serialized_named_tensors": [
                 *         "gASVLg…"
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["TensorBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_update_weights_from_distributed: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "names": [
                 *         "model.norm.weight"
                 *       ],
                 *       "dtypes": [
                 *         "bfloat16"
                 *       ],
                 *       "shapes": [
                 *         [
                 *           4096
                 *         ]
                 *       ]
                 *     }
                 */
                "application/json": components["schemas"]["DistributedBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_init_weights_update_group: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "master_address": "10.0.0.1",
                 *       "master_port": 29500,
                 *       "rank_offset": 1,
                 *       "world_size": 2
                 *     }
                 */
                "application/json": components["schemas"]["GroupBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_destroy_weights_update_group: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /** @example {} */
                "application/json": components["schemas"]["GroupNameBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_begin_weight_update: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /** @example {} */
                "application/json": components["schemas"]["SeriesBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_end_weight_update: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /** @example {} */
                "application/json": components["schemas"]["SeriesBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_post_process_weights: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /** @example {} */
                "application/json": components["schemas"]["SeriesBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_get_weights_by_name: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "name": "model.norm.weight",
                 *       "truncate_size": 4
                 *     }
                 */
                "application/json": components["schemas"]["WeightBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": unknown[];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_update_weight_version: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "new_version": "step-2"
                 *     }
                 */
                "application/json": components["schemas"]["VersionBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightUpdate"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_get_weight_version: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightVersion"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_weight_version: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WeightVersion"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_parse_function_call: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "Hi<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
                 *       "tool_call_parser": "hermes"
                 *     }
                 */
                "application/json": components["schemas"]["CallsBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ParsedCalls"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    post_separate_reasoning: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                /**
                 * @example {
                 *       "text": "<think>2 and 2</think>4",
                 *       "reasoning_parser": "qwen3"
                 *     }
                 */
                "application/json": components["schemas"]["ReasoningBody"];
            };
        };
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SeparatedReasoning"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_metrics: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/plain": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_status: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Status"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_loads: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["EngineLoads"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_history: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Samples"];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_v1_requests: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["RequestRecord"][];
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_openapi_json: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": {
                        [key: string]: unknown;
                    };
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_page: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/html": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
    get_docs: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description What was asked for */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/html": string;
                };
            };
            /** @description The request cannot be served as it stands */
            400: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The API key is missing or wrong */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description It is the admin's, or a page of a stranger asks */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description There is no such thing */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The endpoint is for other methods, which Allow names */
            405: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request took longer than it may */
            408: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The body is too long */
            413: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The path is too long */
            414: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request expects what no request may */
            417: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description Too many requests wait: try again after Retry-After seconds */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The headers are too long, or too many */
            431: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The request was aborted */
            499: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description An error of the server */
            500: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
            /** @description The engine is not there: try again after Retry-After seconds */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Error"];
                };
            };
        };
    };
}
